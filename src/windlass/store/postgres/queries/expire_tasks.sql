-- expire_tasks: cancel tasks that wait and should have begun by now; how many.
-- $1 limit, $2 retention, $3 key_retention
SELECT windlass.expire_tasks($1, $2, $3)
