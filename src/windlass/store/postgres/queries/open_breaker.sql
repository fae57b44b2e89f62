-- open_breaker: let nobody call for a while, unless it has opened or closed since it was looked at.
-- $1 name, $2 epoch at that look (0: there was no row), $3 recovery, $4 patience with whoever holds the row.
WITH limited AS MATERIALIZED (
    SELECT set_config('lock_timeout', (extract(epoch FROM $4::interval) * 1000)::bigint::text, true)
)
INSERT INTO windlass.breaker AS b (name, epoch, half_open_at, opened_for)
SELECT $1, $2::bigint + 1, windlass.clock() + $3::interval, $3::interval
FROM limited
ON CONFLICT (name) DO UPDATE
SET epoch = b.epoch + 1,
    half_open_at = windlass.clock() + $3::interval,
    opened_for = $3::interval,
    prober = NULL,
    prober_until = NULL
WHERE b.epoch = $2
RETURNING true
