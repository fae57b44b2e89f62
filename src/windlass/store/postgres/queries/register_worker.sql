-- register_worker: enter a worker into the registry.
-- $1 id, $2 host, $3 pid, $4 version, $5 capacity, $6 types, $7 queues, $8 lease,
-- $9 defaults: what it registers for each type, as JSON
WITH moment AS MATERIALIZED (
    SELECT windlass.clock() AS now
), entered AS (
    INSERT INTO windlass.worker (id, host, pid, version, capacity, types, queues, started_at, defaults)
    SELECT $1, $2, $3, $4, $5, $6, $7, m.now, $9::text::jsonb
    FROM moment m
    ON CONFLICT (id) DO NOTHING
)
INSERT INTO windlass.worker_pulse (worker_id, heartbeat_at, expires_at, running, idle)
SELECT $1, m.now, m.now + $8::interval, 0, false
FROM moment m
ON CONFLICT (worker_id) DO UPDATE
SET heartbeat_at = excluded.heartbeat_at, expires_at = excluded.expires_at
