-- settle_tasks: apply what became of tasks; returns those that were not applied now.
-- $1 tokens, $2 which, $3 task_ids, $4 generations, $5 started_after, $6 outcomes, $7 results, $8 delays,
-- $9 errors, $10 reported, $11 retention, $12 dead_retention, $13 key_retention, $14 patience
SELECT ordinal, before, false AS given_up
FROM windlass.settle_batch($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14)
