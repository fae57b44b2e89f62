-- set_rule: let what an operator says of a queue or a type stand instead of what code declares; wake idle workers.
-- $1 scope, $2 name, $3 concurrency, $4 rate, $5 burst, $6 ageing, $7 weight
WITH patience AS MATERIALIZED (SELECT set_config('lock_timeout', '5s', true)), noted AS (
    INSERT INTO windlass.lane_rule (
        scope, name, by_operator, concurrency, rate, burst, ageing, weight, changed_at
    )
    SELECT $1, $2, true, $3, $4, $5, $6, $7, windlass.clock()
    FROM patience
    ON CONFLICT (scope, name, by_operator) DO UPDATE
    SET concurrency = excluded.concurrency, rate = excluded.rate, burst = excluded.burst,
        ageing = excluded.ageing, weight = excluded.weight, changed_at = excluded.changed_at
    RETURNING true
)
SELECT windlass.wake(false) FROM noted
