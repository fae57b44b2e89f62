-- read_type: what a worker registered for a type. $1 name
SELECT name, queue, priority, max_attempts, retention_seconds, limit_by::text
FROM windlass.task_type
WHERE name = $1
