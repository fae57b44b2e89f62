-- pause_queue: grant no more tasks of a queue. $1 name
WITH patience AS MATERIALIZED (SELECT set_config('lock_timeout', '5s', true))
INSERT INTO windlass.queue AS known (name, paused_at)
SELECT $1, windlass.clock() FROM patience
ON CONFLICT (name) DO UPDATE
SET paused_at = excluded.paused_at
WHERE known.paused_at IS NULL
