-- claim_one: grant one task, if it is ready, the worker's, and the first of its lane. One row.
-- $1 worker, $2 token, $3 types, $4 queues, $5 lease, $6 lane, $7 task_id, $8 from_x, $9 from_n
SELECT type, queue, priority, payload, attempts, max_attempts, waited, fence, is_behind
FROM windlass.claim_one($1, $2, $3, $4, $5, $6, $7, $8, $9)
