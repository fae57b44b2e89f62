-- bury_ready: end tasks that became ready for another attempt, of a type whose retries are stopped; how many, and
-- where to go on: a lane, the transaction and the number of the last one that was looked at.
-- $1 type, $2 lane, $3 transaction, $4 number, $5 looks, $6 limit, $7 dead_retention, $8 key_retention
SELECT buried, next_lane, next_x, next_n
FROM windlass.bury_ready($1, $2, $3, $4, $5, $6, $7, $8)
