-- remove_dead_workers: remove workers silent for three leases; their claims expire by themselves.
WITH silent AS (
    DELETE FROM windlass.worker_pulse p
    WHERE p.expires_at + 2 * (p.expires_at - p.heartbeat_at) <= windlass.clock()
    RETURNING p.worker_id
)
DELETE FROM windlass.worker w
USING silent s
WHERE w.id = s.worker_id
RETURNING w.id
