-- reset_value_rule: take back what an operator said of one value, or of each (NULL); say whether there was anything.
-- $1 type, $2 value
WITH patience AS MATERIALIZED (SELECT set_config('lock_timeout', '5s', true)), gone AS (
    DELETE FROM windlass.value_rule v
    USING patience
    WHERE v.type = $1 AND v.value IS NOT DISTINCT FROM $2::text AND v.by_operator
    RETURNING v.type
)
SELECT EXISTS (SELECT FROM gone), (SELECT windlass.change_value_rules(ARRAY[g.type]) FROM gone g)
