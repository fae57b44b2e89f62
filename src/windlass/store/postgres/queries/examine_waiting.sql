-- examine_waiting: tasks that could run, by queue and type, and for how many seconds the first has waited.
WITH moment AS MATERIALIZED (
    SELECT windlass.clock() AS now
), head AS MATERIALIZED (
    SELECT r.lane, count(*) AS tasks, min(r.ready_at) AS oldest
    FROM windlass.ready r
    GROUP BY r.lane
), lanes AS (
    SELECT lane, queue, type FROM windlass.lane
    UNION
    SELECT lane, queue, type FROM windlass.resting_lane
)
SELECT
    l.queue, l.type,
    sum(h.tasks)::bigint AS tasks,
    extract(epoch FROM max(m.now) - min(h.oldest))::float8 AS waited,
    bool_or(q.paused_at IS NOT NULL) AS is_paused
FROM head h
CROSS JOIN moment m
JOIN lanes l ON l.lane = h.lane
LEFT JOIN windlass.queue q ON q.name = l.queue
GROUP BY l.queue, l.type
ORDER BY l.queue, l.type
