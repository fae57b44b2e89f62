-- explain_workers: workers that live, oldest first. $1 now
SELECT
    w.id, w.host, w.pid, w.version, w.capacity, w.types, w.queues, w.started_at, w.heartbeat_at, w.running, w.idle,
    w.leader, w.breakers, w.paused_at, w.drained_at, w.full_queues
FROM windlass.workers w
JOIN windlass.worker_pulse p ON p.worker_id = w.id
WHERE p.expires_at > $1
ORDER BY w.started_at, w.id
