-- close_breaker: let everybody call again, unless it has opened or closed since it was looked at.
-- $1 name, $2 epoch at that look, $3 patience with whoever holds the row.
WITH limited AS MATERIALIZED (
    SELECT set_config('lock_timeout', (extract(epoch FROM $3::interval) * 1000)::bigint::text, true)
)
UPDATE windlass.breaker b
SET epoch = b.epoch + 1,
    half_open_at = NULL,
    opened_for = NULL,
    prober = NULL,
    prober_until = NULL
FROM limited
WHERE b.name = $1 AND b.epoch = $2 AND b.half_open_at IS NOT NULL
RETURNING true
