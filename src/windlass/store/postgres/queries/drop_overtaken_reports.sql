-- drop_overtaken_reports: tasks reported as running after they had ended. Skips what somebody holds.
WITH overtaken AS MATERIALIZED (
    SELECT r.ctid AS place
    FROM windlass.running r
    WHERE NOT EXISTS (
        SELECT FROM windlass.task t WHERE t.id = r.task_id AND t.generation = r.generation
    )
    FOR UPDATE OF r SKIP LOCKED
)
DELETE FROM windlass.running r USING overtaken o WHERE r.ctid = o.place
