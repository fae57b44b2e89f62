-- expire_tasks: cancel tasks that wait and should have begun by now; how many, and whether there may be more.
-- $1 limit, $2 retention, $3 key_retention
SELECT cancelled, has_more
FROM windlass.expire_tasks($1, $2, $3)
