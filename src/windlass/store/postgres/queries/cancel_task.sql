-- cancel_task: end a waiting task or ask its worker; NULL if nobody knows it.
-- $1 task_id, $2 reason, $3 retention, $4 key_retention
SELECT windlass.cancel_task($1, $2, $3, $4)
