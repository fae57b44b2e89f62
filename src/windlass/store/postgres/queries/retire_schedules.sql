-- retire_schedules: fire no more slots of schedules whose code is gone. $1 names. Those held by lock_schedules.
UPDATE windlass.schedule
SET retired_at = windlass.clock(), revision = revision + 1
WHERE name = ANY ($1::text[])
