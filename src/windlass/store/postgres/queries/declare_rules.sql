-- declare_rules: note what code declares for queues and types, and forget what it no longer does for its types.
-- $1 scopes, $2 names, $3 concurrency, $4 rates, $5 bursts, $6 ageing, $7 weights, $8 types; of limits by value:
-- $9 types, $10 concurrency, $11 rates, $12 bursts, $13 weights
-- A rule that would not change is not touched: somebody's transaction may hold it.
WITH patience AS MATERIALIZED (SELECT set_config('lock_timeout', '5s', true)), declared AS MATERIALIZED (
    SELECT u.*
    FROM patience, unnest(
        $1::text[], $2::text[], $3::integer[], $4::float8[], $5::float8[], $6::float8[], $7::integer[]
    ) AS u (scope, name, concurrency, rate, burst, ageing, weight)
), gone AS (
    DELETE FROM windlass.lane_rule r
    USING patience
    WHERE r.scope = 'type' AND r.name = ANY ($8::text[]) AND NOT r.by_operator
        AND NOT EXISTS (SELECT FROM declared d WHERE (d.scope, d.name) = (r.scope, r.name))
    RETURNING true
), noted AS (
    INSERT INTO windlass.lane_rule AS known (
        scope, name, by_operator, concurrency, rate, burst, ageing, weight, changed_at
    )
    SELECT d.scope, d.name, false, d.concurrency, d.rate, d.burst, d.ageing, d.weight, windlass.clock()
    FROM declared d
    WHERE NOT EXISTS (
        SELECT
        FROM windlass.lane_rule r
        WHERE (r.scope, r.name) = (d.scope, d.name) AND NOT r.by_operator
            AND (r.concurrency, r.rate, r.burst, r.ageing, r.weight)
            IS NOT DISTINCT FROM (d.concurrency, d.rate, d.burst, d.ageing, d.weight)
    )
    ORDER BY d.scope, d.name
    ON CONFLICT (scope, name, by_operator) DO UPDATE
    SET concurrency = excluded.concurrency, rate = excluded.rate, burst = excluded.burst,
        ageing = excluded.ageing, weight = excluded.weight, changed_at = excluded.changed_at
    RETURNING true
), each AS MATERIALIZED (
    SELECT u.*
    FROM patience, unnest($9::text[], $10::integer[], $11::float8[], $12::float8[], $13::integer[])
        AS u (type, concurrency, rate, burst, weight)
), forgotten AS (
    DELETE FROM windlass.value_rule v
    USING patience
    WHERE v.type = ANY ($8::text[]) AND v.value IS NULL AND NOT v.by_operator
        AND NOT EXISTS (SELECT FROM each e WHERE e.type = v.type)
    RETURNING v.type
), said AS (
    INSERT INTO windlass.value_rule (type, value, by_operator, concurrency, rate, burst, weight, changed_at)
    SELECT e.type, NULL, false, e.concurrency, e.rate, e.burst, e.weight, windlass.clock()
    FROM each e
    WHERE NOT EXISTS (
        SELECT
        FROM windlass.value_rule v
        WHERE v.type = e.type AND v.value IS NULL AND NOT v.by_operator
            AND (v.concurrency, v.rate, v.burst, v.weight)
            IS NOT DISTINCT FROM (e.concurrency, e.rate, e.burst, e.weight)
    )
    ORDER BY e.type
    ON CONFLICT (type, value, by_operator) DO UPDATE
    SET concurrency = excluded.concurrency, rate = excluded.rate, burst = excluded.burst,
        weight = excluded.weight, changed_at = excluded.changed_at
    RETURNING type
), changed AS (
    SELECT array_agg(k.type) AS types
    FROM (SELECT f.type FROM forgotten f UNION SELECT s.type FROM said s) k
)
SELECT windlass.wake(false), windlass.change_value_rules(c.types)
FROM changed c
WHERE EXISTS (SELECT FROM gone) OR EXISTS (SELECT FROM noted) OR c.types IS NOT NULL
