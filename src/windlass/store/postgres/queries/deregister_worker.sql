-- deregister_worker: leave the registry; claims are not touched. $1 worker_id
WITH pulse AS (
    DELETE FROM windlass.worker_pulse WHERE worker_id = $1
)
DELETE FROM windlass.worker
WHERE id = $1
