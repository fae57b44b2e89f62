-- discard_old_dead: remove dead tasks whose day has come, with all that is kept of them. $1 limit
SELECT count(*)
FROM windlass.remove_dead(ARRAY(
    SELECT d.id
    FROM windlass.dead d
    WHERE d.drop_on < (SELECT (windlass.clock() AT TIME ZONE 'UTC')::date)
    ORDER BY d.drop_on
    LIMIT $1
    FOR UPDATE OF d SKIP LOCKED
))
