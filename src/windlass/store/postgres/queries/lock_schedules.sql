-- lock_schedules: hold the schedules of an application and those it names, and return them.
-- $1 owner, $2 names. In sorted order: workers that start together wait for each other once.
SELECT
    s.name, s.owner, s.cron, s.every, s.timezone, s.task::text AS task, s.overlap, s.catch_up, s.jitter,
    s.revision, s.decided_until, s.settled, windlass.clock() AS now, s.paused_at, s.resumed_at,
    s.retired_at IS NOT NULL AS is_retired
FROM windlass.schedule s
WHERE s.name = ANY ($2::text[]) OR s.owner = $1
ORDER BY s.name
FOR UPDATE
