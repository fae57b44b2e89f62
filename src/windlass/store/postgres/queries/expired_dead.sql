-- expired_dead: dead tasks whose day has come. $1 limit
SELECT d.id, d.queue
FROM windlass.dead d
WHERE d.drop_on < (SELECT (windlass.clock() AT TIME ZONE 'UTC')::date)
ORDER BY d.drop_on
LIMIT $1
