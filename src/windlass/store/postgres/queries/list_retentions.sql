-- list_retentions: the retentions, in seconds, that registered types ask for.
SELECT DISTINCT retention_seconds
FROM windlass.task_type
WHERE retention_seconds IS NOT NULL
