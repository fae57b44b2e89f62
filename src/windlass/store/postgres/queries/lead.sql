-- lead: renew the term that is shown, or take a seat that is free; nothing if it is taken.
-- $1 candidate, $2 current_term (NULL: none), $3 term.
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
WHERE (s.holder = $1 AND s.term = $2) OR s.expires_at <= windlass.clock()
RETURNING l.term
