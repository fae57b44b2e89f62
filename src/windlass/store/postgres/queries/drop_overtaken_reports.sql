-- drop_overtaken_reports: tasks reported as running after they had ended.
DELETE FROM windlass.running r
WHERE NOT EXISTS (
    SELECT FROM windlass.task t WHERE t.id = r.task_id AND t.generation = r.generation
)
