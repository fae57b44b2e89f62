-- retry_task: reopen an unsuccessful task; false if it is none. $1 task_id
SELECT windlass.retry_task($1)
