-- claim_tasks: grant ready tasks under one lease. A row of columns for each lane; the last is the report.
-- $1 worker, $2 token, $3 types, $4 queues, $5 wanted, $6 lease, $7 ageing, $8 alone,
-- $9 lanes, $10 from_x, $11 from_n, $12 late_x, $13 at_most: of lanes that have a limit,
-- $14 other_than: queues
SELECT
    type, queue, priority, ids, payloads, attempts, max_attempts, generations, waited,
    fence, snapshot, read_lanes, last_x, last_n, read_to_end, alone_waiting, due_in,
    cancelled, reasons, more_in, is_capped, has_calls,
    CASE WHEN ids IS NOT NULL AND EXISTS (SELECT FROM windlass.expiry) THEN windlass.expired_among(ids) END AS expired
FROM windlass.claim_batches($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14)
