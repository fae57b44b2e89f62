-- pause_type: grant no more tasks of a type. $1 type
WITH patience AS MATERIALIZED (SELECT set_config('lock_timeout', '5s', true))
INSERT INTO windlass.paused_type (type, paused_at)
SELECT $1, windlass.clock() FROM patience
ON CONFLICT (type) DO NOTHING
