-- renew_schedules: let the slots of schedules begin anew. $1 names. Those held by lock_schedules.
UPDATE windlass.schedule
SET decided_until = windlass.clock(),
    look_at = '-infinity',
    paused_at = CASE WHEN paused_at IS NOT NULL AND resumed_at IS NULL THEN windlass.clock() END,
    resumed_at = NULL
WHERE name = ANY ($1::text[])
