-- discard_old_dead: remove dead tasks whose day has come, with their keys, tags and payloads. $1 limit
WITH removing AS MATERIALIZED (
    SELECT set_config('windlass_internal.removing', 'on', true)
), old AS MATERIALIZED (
    SELECT d.id
    FROM removing, windlass.dead d
    WHERE d.drop_on < (SELECT (windlass.clock() AT TIME ZONE 'UTC')::date)
    ORDER BY d.drop_on
    LIMIT $1
    FOR UPDATE OF d SKIP LOCKED
), gone AS (
    DELETE FROM windlass.dead d
    USING old
    WHERE d.id = old.id
    RETURNING d.id, d.type, d.idempotency_key, d.tags, d.payload IS NULL AS is_large
), forgotten AS (
    DELETE FROM windlass.idempotency i
    USING gone g
    WHERE i.type = g.type AND i.key = g.idempotency_key AND i.task_id = g.id
), untagged AS (
    DELETE FROM windlass.task_tag k
    USING (SELECT g.id, unnest(g.tags) AS tag FROM gone g) t
    WHERE k.tag = t.tag AND k.task_id = t.id
), emptied AS (
    DELETE FROM windlass.large_payload l
    USING gone g
    WHERE g.is_large AND l.task_id = g.id
)
SELECT count(*)
FROM gone
