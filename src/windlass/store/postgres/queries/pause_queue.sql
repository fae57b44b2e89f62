-- pause_queue: grant no more tasks of a queue. $1 name
INSERT INTO windlass.queue AS known (name, paused_at)
VALUES ($1, windlass.clock())
ON CONFLICT (name) DO UPDATE
SET paused_at = excluded.paused_at
WHERE known.paused_at IS NULL
