-- cancel_tasks: end those of these tasks that wait, ask the workers of others; which answer each gets.
-- $1 task_ids, $2 reason, $3 retention, $4 key_retention
SELECT task_id, answer
FROM windlass.cancel_tasks($1, $2, $3, $4)
