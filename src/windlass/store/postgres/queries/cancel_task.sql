-- cancel_task: end a waiting task or ask its worker; NULL if nobody knows it.
-- $1 task_id, $2 reason, $3 retention, $4 key_retention
-- Somebody may hold it for as long as they like: SQL waits for them, we do not.
WITH patience AS MATERIALIZED (SELECT set_config('lock_timeout', '5s', true))
SELECT windlass.cancel_task($1, $2, $3, $4) FROM patience
