-- pause_schedule: fire no more slots, and say whether it was not paused; nothing if it is not known. $1 name
-- Locks the row first: whoever waited decides on what was written meanwhile.
WITH known AS MATERIALIZED (
    SELECT s.name, s.is_active
    FROM windlass.schedule s
    WHERE s.name = $1 AND s.retired_at IS NULL
    FOR UPDATE
), paused AS (
    UPDATE windlass.schedule s
    SET paused_at = coalesce(s.paused_at, windlass.clock()),
        resumed_at = NULL,
        revision = s.revision + 1
    FROM known k
    WHERE s.name = k.name AND k.is_active
)
SELECT k.is_active
FROM known k
