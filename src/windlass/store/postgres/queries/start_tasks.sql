-- start_tasks: report tasks as running; returns those whose claim is lost.
-- $1 tokens, $2 task_ids, $3 generations, $4 started_after
SELECT task_id
FROM windlass.start_tasks($1, $2, $3, $4) AS lost (task_id)
