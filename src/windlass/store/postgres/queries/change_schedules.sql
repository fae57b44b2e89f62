-- change_schedules: write what schedules are from now on; those held by lock_schedules.
-- $1 owner, $2 names, $3 crons, $4 everys, $5 timezones, $6 tasks, $7 overlaps, $8 catch_ups, $9 jitters
UPDATE windlass.schedule s
SET owner = $1,
    cron = u.cron,
    every = u.every,
    timezone = u.timezone,
    task = u.task::jsonb,
    overlap = u.overlap,
    catch_up = u.catch_up,
    jitter = u.jitter,
    registered_at = windlass.clock(),
    revision = s.revision + 1,
    retired_at = NULL
FROM unnest(
    $2::text[], $3::text[], $4::interval[], $5::text[], $6::text[], $7::text[], $8::integer[], $9::interval[]
) AS u (name, cron, every, timezone, task, overlap, catch_up, jitter)
WHERE s.name = u.name
