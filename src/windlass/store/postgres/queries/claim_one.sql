-- claim_one: grant one task, if it is ready and the worker's. One row, or none.
-- $1 worker, $2 token, $3 types, $4 queues, $5 lease, $6 task_id
SELECT type, queue, priority, payload, attempts, max_attempts, waited, fence
FROM windlass.claim_one($1, $2, $3, $4, $5, $6)
