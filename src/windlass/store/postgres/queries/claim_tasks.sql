-- claim_tasks: grant ready tasks under one lease. The first row is the report, the rest are tasks.
-- $1 worker, $2 token, $3 types, $4 queues, $5 wanted, $6 lease, $7 ageing, $8 alone,
-- $9 lanes, $10 from_x, $11 from_n, $12 late_x
SELECT
    id, type, queue, priority, payload, attempts, max_attempts, generation, cancel_reason,
    waited, fence, snapshot, read_lanes, last_x, last_n, read_to_end, alone_waiting, due_in
FROM windlass.claim_tasks($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)
