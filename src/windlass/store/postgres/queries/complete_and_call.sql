-- complete_and_call: the same as complete_task, of a type that calls back.
-- $1 token, $2 task_id, $3 generation, $4 started_after, $5 result, $6 retention, $7 key_retention
SELECT windlass.complete_and_call(
    CAST($1 AS uuid), CAST($2 AS uuid), CAST($3 AS integer), CAST($4 AS float8), $5,
    CAST($6 AS interval), CAST($7 AS interval)
)
