-- look_for_chores: what there may be for a leader to do: whether there is any such row, and no more.
SELECT
    windlass.clock() AS now,
    EXISTS (SELECT FROM windlass.claim) AS claims,
    EXISTS (SELECT FROM windlass.scheduled) AS scheduled,
    EXISTS (
        SELECT FROM windlass.worker_pulse p
        WHERE p.expires_at <= windlass.clock() OR p.heartbeat_at > windlass.clock()
    ) AS silent_workers,
    EXISTS (SELECT FROM windlass.cancel_request)
        OR EXISTS (SELECT FROM windlass.running)
        OR EXISTS (SELECT FROM windlass.resting_lane) AS leftovers,
    EXISTS (SELECT FROM windlass.expiry) AS expiring
