-- list_lineage: which of these tasks are replays, and of which. $1 task_ids
SELECT r.task_id, r.ancestor
FROM windlass.replay r
WHERE r.task_id = ANY ($1::uuid[])
