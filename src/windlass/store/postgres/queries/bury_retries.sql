-- bury_retries: end tasks that wait for another attempt, of a type whose retries are stopped; how many.
-- $1 type, $2 limit, $3 dead_retention, $4 key_retention
SELECT windlass.bury_retries($1, $2, $3, $4)
