-- remove_dead: remove dead tasks with all that is kept of them; returns which. $1 task_ids
SELECT id
FROM windlass.remove_dead($1) AS id
