-- bury_scheduled: end tasks that wait for the time of another attempt, of a type whose retries are stopped; how many,
-- and where to go on: a lane, and the last task that was looked at.
-- $1 type, $2 lane, $3 task_id, $4 looks, $5 limit, $6 dead_retention, $7 key_retention
SELECT buried, next_lane, next_id
FROM windlass.bury_scheduled($1, $2, $3, $4, $5, $6, $7)
