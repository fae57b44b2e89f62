-- resume_schedule: fire slots from now on, and say whether it was paused; nothing if it is not known. $1 name
-- Tells the leader, as tell_of_schedules does: it may be the only schedule.
-- Locks the row first: whoever waited decides on what was written meanwhile.
WITH known AS MATERIALIZED (
    SELECT s.name, s.is_active
    FROM windlass.schedule s
    WHERE s.name = $1 AND s.retired_at IS NULL
    FOR UPDATE
), resumed AS (
    UPDATE windlass.schedule s
    SET resumed_at = windlass.clock(),
        look_at = '-infinity',
        revision = s.revision + 1
    FROM known k
    WHERE s.name = k.name AND NOT k.is_active
)
SELECT NOT k.is_active, CASE WHEN NOT k.is_active THEN pg_notify('windlass.wake', 'schedules') END
FROM known k
