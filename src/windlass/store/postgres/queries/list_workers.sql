-- list_workers: registered workers, oldest first.
SELECT
    id, host, pid, version, capacity, types, queues, started_at, heartbeat_at, running, idle, leader,
    breakers, paused_at, drained_at, full_queues
FROM windlass.workers
ORDER BY started_at, id
