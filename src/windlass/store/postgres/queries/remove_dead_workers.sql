-- remove_dead_workers: remove workers silent for three leases; their claims expire by themselves.
-- One whose row somebody holds may be about to give a sign of life: it is left for the next sweep.
WITH silent AS MATERIALIZED (
    SELECT p.worker_id
    FROM windlass.worker_pulse p
    JOIN windlass.worker w ON w.id = p.worker_id
    WHERE p.expires_at + 2 * (p.expires_at - p.heartbeat_at) <= windlass.clock()
    FOR UPDATE SKIP LOCKED
), removed AS (
    DELETE FROM windlass.worker_pulse p
    USING silent s
    WHERE p.worker_id = s.worker_id
)
DELETE FROM windlass.worker w
USING silent s
WHERE w.id = s.worker_id
RETURNING w.id
