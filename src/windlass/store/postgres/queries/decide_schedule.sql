-- decide_schedule: note up to when a schedule is decided on; nothing if it was changed or decided on meanwhile.
-- $1 name, $2 revision, $3 decided_until as it was read, $4 until, $5 look_at, $6 settled
UPDATE windlass.schedule
SET decided_until = $4, look_at = $5, settled = $6::timestamptz[], paused_at = NULL, resumed_at = NULL
WHERE name = $1 AND revision = $2 AND decided_until = $3
RETURNING true
