-- which_dead: those of these tasks that are failed or dead. $1 task_ids
SELECT id
FROM windlass.dead
WHERE id = ANY ($1::uuid[])
