-- A worker says how its circuit breakers are. NULL: it has none, or is older than this.
ALTER TABLE windlass.worker_pulse ADD COLUMN breakers jsonb;

CREATE OR REPLACE VIEW windlass.workers AS
SELECT
    w.id, w.host, w.pid, w.version, w.capacity, w.types, w.queues, w.started_at,
    p.heartbeat_at, p.running, p.idle,
    coalesce(l.holder = w.id AND l.expires_at > windlass.clock(), false) AS leader,
    p.breakers
FROM windlass.worker w
JOIN windlass.worker_pulse p ON p.worker_id = w.id
CROSS JOIN windlass.leadership l;
