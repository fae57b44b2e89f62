-- read_breakers: how breakers are that workers share; those that never opened are left out. $1 names
-- What stays open for longer than it was opened for was opened before the clock was set back: it is half-open.
SELECT
    b.name,
    b.epoch,
    CASE
        WHEN b.half_open_at - c.now BETWEEN interval '0' AND b.opened_for
        THEN extract(epoch FROM b.half_open_at - c.now)::float8
        ELSE 0.0
    END AS open_for,
    b.half_open_at IS NULL AS is_closed
FROM windlass.breaker b
CROSS JOIN (SELECT windlass.clock() AS now) c
WHERE b.name = ANY ($1::text[])
