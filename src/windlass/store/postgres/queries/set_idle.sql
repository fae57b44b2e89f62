-- set_idle: say whether enqueues should notify this worker. $1 worker_id, $2 idle
UPDATE windlass.worker_pulse
SET idle = $2
WHERE worker_id = $1 AND idle <> $2
