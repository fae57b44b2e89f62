-- examine_types: what was registered last for each type.
SELECT name, queue, priority, max_attempts, retention_seconds AS retention
FROM windlass.task_type
