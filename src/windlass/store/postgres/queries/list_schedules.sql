-- list_schedules: schedules that are not retired, with the last slot that was fired and the last that was skipped:
-- a row for each of these, or one without.
SELECT
    s.name, s.owner, s.cron, s.every, s.timezone, s.task::text AS task, s.overlap, s.catch_up, s.jitter,
    CASE WHEN s.resumed_at IS NULL THEN s.paused_at END AS paused_at,
    s.registered_at,
    k.slot_at, k.state, k.decided_at, k.task_id, k.reason, k.first_at, k.slots, k.on_request
FROM windlass.schedule s
LEFT JOIN LATERAL (
    (
        SELECT f.* FROM windlass.slot f
        WHERE f.schedule = s.name AND f.state = 'fired'
        ORDER BY f.slot_at DESC, f.on_request DESC
        LIMIT 1
    )
    UNION ALL
    (
        SELECT d.* FROM windlass.slot d
        WHERE d.schedule = s.name AND d.state = 'skipped'
        ORDER BY d.slot_at DESC
        LIMIT 1
    )
) k ON true
WHERE s.retired_at IS NULL
ORDER BY s.name COLLATE "C"
