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
        OR EXISTS (SELECT FROM windlass.resting_lane)
        OR EXISTS (SELECT FROM windlass.dedupe d WHERE d.until <= (SELECT windlass.clock())) AS leftovers,
    EXISTS (SELECT FROM windlass.expiry) AS expiring,
    (
        -- Before PostgreSQL 17 no difference may be infinite.
        SELECT (
            extract(epoch FROM min(CASE WHEN s.decided_until > windlass.clock() THEN '-infinity' ELSE s.look_at END))
            - extract(epoch FROM windlass.clock())
        )::float8
        FROM windlass.schedule s
        WHERE s.is_active
    ) AS schedule_in,
    EXISTS (SELECT FROM windlass.gate_call) OR EXISTS (SELECT FROM windlass.value_rule_change) AS gates
