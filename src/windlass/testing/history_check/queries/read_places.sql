-- read_places: every task and each place it is in; a claim counts if it has the task's generation.
SELECT id::text AS id, 'task' AS place FROM windlass.task
UNION ALL
SELECT task_id::text, 'ready' FROM windlass.ready
UNION ALL
SELECT task_id::text, 'scheduled' FROM windlass.scheduled
UNION ALL
SELECT t.id::text, 'claim'
FROM windlass.claim c
JOIN windlass.claim_task b ON b.token = c.token
CROSS JOIN LATERAL unnest(b.task_ids, b.generations) AS u (task_id, generation)
JOIN windlass.task t ON t.id = u.task_id AND t.generation = u.generation
UNION ALL
SELECT id::text, 'history' FROM windlass.history
UNION ALL
SELECT id::text, 'dead' FROM windlass.dead
