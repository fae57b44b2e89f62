-- list_task_retentions: the retentions, in seconds, that these tasks ask for. $1 task_ids (NULL: all)
SELECT DISTINCT retention_seconds
FROM windlass.task
WHERE retention_seconds IS NOT NULL AND ($1::uuid[] IS NULL OR id = ANY ($1))
