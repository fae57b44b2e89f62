-- check_completion: refuse a handler that has lost its lease; whether its task has a place to rest.
-- $1 token, $2 task_id, $3 generation, $4 retention, $5 key_retention
SELECT windlass.check_completion($1, $2, $3, $4, $5)
