-- settle_tasks: apply what became of tasks; returns those that were not applied now.
-- $1 tokens, $2 task_ids, $3 generations, $4 outcomes, $5 started_after, $6 results, $7 delays,
-- $8 errors, $9 reported, $10 retention, $11 dead_retention, $12 key_retention, $13 patience
SELECT ordinal, before
FROM windlass.settle_tasks($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13)
