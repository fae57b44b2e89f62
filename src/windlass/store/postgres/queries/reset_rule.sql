-- reset_rule: let what code declares of a queue or a type stand again; say whether an operator had set anything.
-- $1 scope, $2 name
WITH patience AS MATERIALIZED (SELECT set_config('lock_timeout', '5s', true)), gone AS (
    DELETE FROM windlass.lane_rule r
    USING patience
    WHERE r.scope = $1 AND r.name = $2 AND r.by_operator
    RETURNING true
)
SELECT EXISTS (SELECT FROM gone), windlass.wake(false)
