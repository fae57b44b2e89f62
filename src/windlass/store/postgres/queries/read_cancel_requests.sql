-- read_cancel_requests: the cancellations asked for among these tasks. $1 task_ids
SELECT task_id, reason
FROM windlass.cancel_request
WHERE task_id = ANY ($1::uuid[])
