-- leave_breaker: let another make the trials of a breaker, if this holder does.
-- $1 name, $2 holder, $3 patience with whoever holds the row.
WITH limited AS MATERIALIZED (
    SELECT set_config('lock_timeout', (extract(epoch FROM $3::interval) * 1000)::bigint::text, true)
)
UPDATE windlass.breaker b
SET prober = NULL,
    prober_until = NULL
FROM limited
WHERE b.name = $1 AND b.prober = $2
