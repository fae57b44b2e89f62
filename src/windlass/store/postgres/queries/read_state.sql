-- read_state: the state of one task, NULL if nobody knows it. $1 task_id
SELECT status::text
FROM windlass.tasks
WHERE id = $1
