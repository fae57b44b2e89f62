-- claim_lane: grant ready tasks of one lane. One row, with the tasks and the report.
-- $1 worker, $2 token, $3 types, $4 queues, $5 wanted, $6 lease, $7 lane, $8 from_x, $9 from_n
SELECT
    type, queue, priority, ids, payloads, attempts, max_attempts, generations, waited,
    fence, snapshot, read_lanes, last_x, last_n, read_to_end, alone_waiting, due_in,
    cancelled, reasons,
    CASE WHEN ids IS NOT NULL AND EXISTS (SELECT FROM windlass.expiry) THEN windlass.expired_among(ids) END AS expired
FROM windlass.claim_lane($1, $2, $3, $4, $5, $6, $7, $8, $9)
