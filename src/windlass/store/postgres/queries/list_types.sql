-- list_types: every registered type, and those whose retries are stopped.
SELECT
    coalesce(y.name, s.type) AS name, coalesce(y.queue, 'default') AS queue,
    coalesce(y.priority, 10) AS priority, coalesce(y.max_attempts, 4) AS max_attempts,
    coalesce(y.registered_at, s.stopped_at) AS registered_at, s.stopped_at, s.reason
FROM windlass.task_type y
FULL JOIN windlass.stopped_type s ON s.type = y.name
ORDER BY 1
