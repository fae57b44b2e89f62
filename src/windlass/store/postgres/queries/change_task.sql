-- change_task: change a waiting task; false if it does not wait.
-- $1 task_id, $2 priority, $3 queue, $4 due, $5 delay
SELECT windlass.change_task($1, $2, $3, $4, $5)
