-- due_schedules: schedules that want a decision, with all that it depends on.
-- $1 limit, $2 slots to look back at, $3 names of those that are left out
-- One that was decided on ahead of the clock is due too: that was set back.
SELECT
    s.name, s.cron, s.every, s.timezone, s.task::text AS task, s.overlap, s.catch_up, s.jitter,
    s.revision, s.decided_until, s.settled, windlass.clock() AS now, s.paused_at, s.resumed_at,
    (
        SELECT k.task_id
        FROM (
            SELECT l.task_id, l.slot_at
            FROM windlass.slot l
            WHERE l.schedule = s.name AND l.state = 'fired'
            ORDER BY l.slot_at DESC, l.on_request DESC
            LIMIT $2
        ) k
        WHERE EXISTS (SELECT FROM windlass.task t WHERE t.id = k.task_id)
        ORDER BY k.slot_at DESC
        LIMIT 1
    ) AS live_task,
    ARRAY(
        SELECT w.slot_at
        FROM windlass.slot w
        WHERE w.schedule = s.name AND w.state = 'waiting'
        ORDER BY w.slot_at
    ) AS waiting
FROM windlass.schedule s
WHERE s.is_active AND (s.look_at <= windlass.clock() OR s.decided_until > windlass.clock())
    AND s.name <> ALL ($3::text[])
ORDER BY s.look_at, s.name
LIMIT $1
