-- find_held: which settlements would wait for a transaction that holds their claim or task.
-- Takes what is free, for this statement only, and waits for nothing. $1 tokens, $2 task_ids
WITH claims AS MATERIALIZED (
    SELECT c.token FROM windlass.claim c WHERE c.token = ANY ($1::uuid[]) FOR NO KEY UPDATE SKIP LOCKED
), tasks AS MATERIALIZED (
    SELECT t.id FROM windlass.task t WHERE t.id = ANY ($2::uuid[]) FOR UPDATE SKIP LOCKED
)
SELECT
    EXISTS (SELECT FROM windlass.claim c WHERE c.token = u.token)
        AND u.token NOT IN (SELECT k.token FROM claims k)
    OR EXISTS (SELECT FROM windlass.task t WHERE t.id = u.task_id)
        AND u.task_id NOT IN (SELECT k.id FROM tasks k) AS held
FROM unnest($1::uuid[], $2::uuid[]) WITH ORDINALITY AS u (token, task_id, ordinal)
ORDER BY u.ordinal
