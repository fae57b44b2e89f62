-- settle_failures: the same as settle_tasks, where tasks may come back, or call back.
-- $1 to $14 as there, $15 max_ages, $16 calls_back
SELECT ordinal, before, given_up
FROM windlass.settle_failures(
    $1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16
)
