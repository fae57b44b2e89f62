-- list_types: every registered type, and those that are paused or whose retries are stopped.
SELECT
    n.name, coalesce(y.queue, 'default') AS queue,
    coalesce(y.priority, 10) AS priority, coalesce(y.max_attempts, 4) AS max_attempts,
    coalesce(y.registered_at, s.stopped_at, p.paused_at) AS registered_at,
    s.stopped_at, s.reason, p.paused_at
FROM (
    SELECT name FROM windlass.task_type
    UNION
    SELECT type FROM windlass.stopped_type
    UNION
    SELECT type FROM windlass.paused_type
) n
LEFT JOIN windlass.task_type y ON y.name = n.name
LEFT JOIN windlass.stopped_type s ON s.type = n.name
LEFT JOIN windlass.paused_type p ON p.type = n.name
ORDER BY 1
