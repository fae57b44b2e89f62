-- renew_schedules: let the slots of schedules begin anew; what was due until now and not decided on is skipped.
-- $1 names, $2 reason. Those held by lock_schedules.
WITH renewed AS (
    UPDATE windlass.schedule s
    SET decided_until = windlass.clock(),
        look_at = '-infinity',
        paused_at = CASE WHEN s.paused_at IS NOT NULL AND s.resumed_at IS NULL THEN windlass.clock() END,
        resumed_at = NULL
    FROM windlass.schedule old
    WHERE s.name = ANY ($1::text[]) AND old.name = s.name
    RETURNING s.name, old.look_at, old.is_active, s.decided_until
)
INSERT INTO windlass.slot (schedule, slot_at, state, decided_at, reason)
SELECT r.name, r.look_at, 'skipped', r.decided_until, $2
FROM renewed r
WHERE r.is_active AND r.look_at <= r.decided_until AND r.look_at > '-infinity'
ON CONFLICT DO NOTHING
