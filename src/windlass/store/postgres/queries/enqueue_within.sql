-- enqueue_within: add tasks in a transaction of the caller; returns their ids in order.
-- $1 tasks, $2 fence
SELECT windlass.enqueue_many(CAST($1 AS jsonb), CAST($2 AS jsonb))
