-- set_value_rule: let what an operator says of one value, or of each (NULL), stand; call the gates of the type.
-- $1 type, $2 value, $3 concurrency, $4 rate, $5 burst, $6 weight
WITH patience AS MATERIALIZED (SELECT set_config('lock_timeout', '5s', true)), noted AS (
    INSERT INTO windlass.value_rule (type, value, by_operator, concurrency, rate, burst, weight, changed_at)
    SELECT $1, $2, true, $3, $4, $5, $6, windlass.clock()
    FROM patience
    ON CONFLICT (type, value, by_operator) DO UPDATE
    SET concurrency = excluded.concurrency, rate = excluded.rate, burst = excluded.burst,
        weight = excluded.weight, changed_at = excluded.changed_at
    RETURNING type
), called AS (
    -- Also if nobody is at its gate yet: somebody may be just opening it.
    INSERT INTO windlass.gate_call (gate, due)
    SELECT windlass.limit_gate(n.type, $2), windlass.clock() FROM noted n WHERE $2 IS NOT NULL
)
SELECT windlass.change_value_rules(ARRAY[n.type]) FROM noted n
