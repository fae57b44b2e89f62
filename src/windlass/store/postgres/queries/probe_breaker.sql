-- probe_breaker: let one holder make the trials of a half-open breaker for a while; nothing if another does.
-- $1 name, $2 epoch when it was looked at, $3 holder, $4 lease, $5 patience with whoever holds the row.
-- What ends later than it could if it had begun now is of before the clock was set back, and over.
WITH limited AS MATERIALIZED (
    SELECT set_config('lock_timeout', (extract(epoch FROM $5::interval) * 1000)::bigint::text, true)
)
UPDATE windlass.breaker b
SET prober = $3,
    prober_until = windlass.clock() + $4::interval
FROM limited
WHERE
    b.name = $1
    AND b.epoch = $2
    AND (b.half_open_at <= windlass.clock() OR b.half_open_at > windlass.clock() + b.opened_for)
    AND (
        b.prober IS NULL
        OR b.prober = $3
        OR b.prober_until <= windlass.clock()
        OR b.prober_until > windlass.clock() + $4::interval
    )
RETURNING true
