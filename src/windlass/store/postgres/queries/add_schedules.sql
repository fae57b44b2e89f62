-- add_schedules: write schedules that are new, and return the names of those that are.
-- $1 owner, $2 names, $3 crons, $4 everys, $5 timezones, $6 tasks, $7 overlaps, $8 catch_ups, $9 jitters
INSERT INTO windlass.schedule (
    name, owner, cron, every, timezone, task, overlap, catch_up, jitter, registered_at, decided_until, look_at
)
SELECT
    u.name, $1, u.cron, u.every, u.timezone, u.task::jsonb, u.overlap, u.catch_up, u.jitter,
    windlass.clock(), windlass.clock(), '-infinity'
FROM unnest(
    $2::text[], $3::text[], $4::interval[], $5::text[], $6::text[], $7::text[], $8::integer[], $9::interval[]
) AS u (name, cron, every, timezone, task, overlap, catch_up, jitter)
ORDER BY u.name
ON CONFLICT (name) DO NOTHING
RETURNING name
