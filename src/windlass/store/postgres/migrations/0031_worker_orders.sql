-- People ask single workers to claim nothing, or to finish and end. A worker hears of it in the answer to its
-- pulse, and what was asked goes with its row. NULL: nothing was, or its worker is older than this.
ALTER TABLE windlass.worker
    ADD COLUMN paused_at timestamptz,
    ADD COLUMN drained_at timestamptz;

-- Of which queues a worker takes nothing for now, since it runs as many of their tasks as it is told to
-- (NULL: it has room in all).
ALTER TABLE windlass.worker_pulse ADD COLUMN full_queues text[];

CREATE OR REPLACE VIEW windlass.workers AS
SELECT
    w.id, w.host, w.pid, w.version, w.capacity, w.types, w.queues, w.started_at,
    p.heartbeat_at, p.running, p.idle,
    coalesce(l.holder = w.id AND l.expires_at > windlass.clock(), false) AS leader,
    p.breakers,
    w.paused_at,
    w.drained_at,
    p.full_queues
FROM windlass.worker w
JOIN windlass.worker_pulse p ON p.worker_id = w.id
CROSS JOIN windlass.leadership l;
