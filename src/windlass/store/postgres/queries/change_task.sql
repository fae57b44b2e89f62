-- change_task: change a waiting task; false if it does not wait.
-- $1 task_id, $2 priority, $3 queue, $4 due, $5 delay
-- Somebody may hold it for as long as they like: SQL waits for them, we do not.
WITH patience AS MATERIALIZED (SELECT set_config('lock_timeout', '5s', true))
SELECT windlass.change_task($1, $2, $3, $4, $5) FROM patience
