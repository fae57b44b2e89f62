-- lead: renew the term that is shown, or take a seat that is free; nothing if it is taken.
-- $1 candidate, $2 current_term (NULL: none), $3 term,
-- $4 steady_for. If the clock was set back the seat may lie ahead. It is free if its holder is not
-- alive by this clock, or has left; and if its holder's last sign of life lies ahead too and the
-- clock went on for one lease of it since. $5 unnoticed_step: less than that is taken for none.
-- Locks the seat first: whoever waited decides on what the winner wrote, at the time after the wait.
WITH seat AS MATERIALIZED (
    SELECT holder, term, expires_at
    FROM windlass.leadership
    FOR UPDATE
)
UPDATE windlass.leadership l
SET holder = $1,
    term = CASE WHEN s.holder = $1 AND s.term = $2 AND s.expires_at > windlass.clock()
        THEN s.term ELSE s.term + 1 END,
    expires_at = windlass.clock() + $3::interval
FROM seat s
WHERE
    (s.holder = $1 AND s.term = $2)
    OR s.expires_at <= windlass.clock()
    OR (
        s.expires_at > windlass.clock() + $3::interval
        AND NOT EXISTS (
            SELECT FROM windlass.worker_pulse p
            WHERE p.worker_id = s.holder AND p.expires_at > windlass.clock()
        )
    )
    OR EXISTS (
        SELECT FROM windlass.worker_pulse p
        WHERE
            p.worker_id = s.holder
            AND p.heartbeat_at > windlass.clock() + $5::interval
            AND p.expires_at - p.heartbeat_at <= $4::interval
    )
RETURNING l.term
