-- list_queues: queues with live tasks or a pause, with how many tasks are where.
WITH lanes AS (
    SELECT lane, queue FROM windlass.lane
    UNION
    SELECT lane, queue FROM windlass.resting_lane
), waiting AS (
    SELECT l.queue, 'pending' AS status, count(*) AS tasks, min(r.ready_at) AS oldest
    FROM windlass.ready r
    JOIN lanes l ON l.lane = r.lane
    GROUP BY l.queue
    UNION ALL
    SELECT l.queue, 'scheduled', count(*), NULL
    FROM windlass.scheduled s
    JOIN lanes l ON l.lane = s.lane
    GROUP BY l.queue
    UNION ALL
    SELECT t.queue, CASE WHEN r.task_id IS NULL THEN 'claimed' ELSE 'running' END, count(*), NULL
    FROM windlass.claim_task b
    CROSS JOIN LATERAL unnest(b.task_ids, b.generations) AS k (task_id, generation)
    JOIN windlass.task t ON t.id = k.task_id AND t.generation = k.generation
    LEFT JOIN windlass.running r ON r.task_id = t.id AND r.generation = t.generation
    GROUP BY 1, 2
)
SELECT
    coalesce(w.queue, q.name) AS name,
    q.paused_at IS NOT NULL AS paused,
    w.status, w.tasks, w.oldest
FROM waiting w
FULL JOIN (SELECT name, paused_at FROM windlass.queue WHERE paused_at IS NOT NULL) q
    ON q.name = w.queue
ORDER BY 1
