-- set_idle: say whether enqueues should notify this worker. $1 worker_id, $2 idle
-- Waits for nobody who holds the row: the next pulse says it again.
WITH free AS MATERIALIZED (
    SELECT p.worker_id
    FROM windlass.worker_pulse p
    WHERE p.worker_id = $1 AND p.idle <> $2
    FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE windlass.worker_pulse p
SET idle = $2
FROM free
WHERE p.worker_id = free.worker_id
