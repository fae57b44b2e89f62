-- enqueue_alike: add tasks that differ in their id and payload alone, and are due now.
-- $1 task_ids, $2 payloads, $3 type, $4 queue, $5 priority, $6 max_attempts, $7 retention
SELECT windlass.enqueue_alike($1, $2, $3, $4, $5, $6, $7)
