-- enqueue_plain_within: add a task that is due now and has no key and no tag in a transaction of the caller;
-- returns the id that it was given.
-- $1 type, $2 payload, $3 queue, $4 priority, $5 max_attempts
SELECT windlass.enqueue(
    CAST($1 AS text), CAST($2 AS jsonb), CAST($3 AS text), CAST($4 AS integer),
    max_attempts => CAST($5 AS integer)
)
