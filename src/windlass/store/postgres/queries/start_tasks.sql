-- start_tasks: report tasks as running; returns those whose claim is lost.
-- $1 tokens, $2 task_ids, $3 generations, $4 started_after, $5 patience
WITH limited AS MATERIALIZED (
    SELECT set_config('lock_timeout', (extract(epoch FROM $5::interval) * 1000)::bigint::text, true)
)
SELECT lost.task_id
FROM limited, LATERAL windlass.start_tasks($1, $2, $3, $4) AS lost (task_id)
