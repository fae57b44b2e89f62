-- examine_workers: registered workers, oldest first; durations are seconds by the schema's clock.
WITH moment AS MATERIALIZED (
    SELECT windlass.clock() AS now
)
SELECT
    w.id::text AS id, w.host, w.pid, w.version, w.types, w.queues, w.defaults::text AS defaults,
    extract(epoch FROM m.now - w.started_at)::float8 AS up_for,
    extract(epoch FROM m.now - p.heartbeat_at)::float8 AS silent_for,
    extract(epoch FROM p.expires_at - p.heartbeat_at)::float8 AS lease
FROM windlass.worker w
JOIN windlass.worker_pulse p ON p.worker_id = w.id
CROSS JOIN moment m
ORDER BY w.started_at, w.id
