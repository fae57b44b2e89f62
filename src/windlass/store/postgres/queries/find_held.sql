-- find_held: which settlements would wait for a transaction that holds a row they need.
-- Takes what is free, for this statement only, and waits for nothing. $1 tokens, $2 task_ids
WITH claims AS MATERIALIZED (
    SELECT c.token FROM windlass.claim c WHERE c.token = ANY ($1::uuid[]) FOR NO KEY UPDATE SKIP LOCKED
), contents AS MATERIALIZED (
    SELECT b.token FROM windlass.claim_task b WHERE b.token = ANY ($1::uuid[]) FOR UPDATE SKIP LOCKED
), tasks AS MATERIALIZED (
    SELECT t.id FROM windlass.task t WHERE t.id = ANY ($2::uuid[]) FOR UPDATE SKIP LOCKED
), reports AS MATERIALIZED (
    SELECT r.task_id FROM windlass.running r WHERE r.task_id = ANY ($2::uuid[]) FOR UPDATE SKIP LOCKED
), requests AS MATERIALIZED (
    SELECT q.task_id FROM windlass.cancel_request q WHERE q.task_id = ANY ($2::uuid[]) FOR UPDATE SKIP LOCKED
), attempts AS MATERIALIZED (
    SELECT a.task_id, a.generation FROM windlass.attempt a
    WHERE a.task_id = ANY ($2::uuid[])
    FOR UPDATE SKIP LOCKED
)
SELECT
    EXISTS (
        SELECT FROM windlass.claim c
        WHERE c.token = u.token AND c.token NOT IN (SELECT k.token FROM claims k)
    )
    OR EXISTS (
        SELECT FROM windlass.claim_task b
        WHERE b.token = u.token AND b.token NOT IN (SELECT k.token FROM contents k)
    )
    OR EXISTS (
        SELECT FROM windlass.task t WHERE t.id = u.task_id AND t.id NOT IN (SELECT k.id FROM tasks k)
    )
    OR EXISTS (
        SELECT FROM windlass.running r
        WHERE r.task_id = u.task_id AND r.task_id NOT IN (SELECT k.task_id FROM reports k)
    )
    OR EXISTS (
        SELECT FROM windlass.cancel_request q
        WHERE q.task_id = u.task_id AND q.task_id NOT IN (SELECT k.task_id FROM requests k)
    )
    OR EXISTS (
        SELECT FROM windlass.attempt a
        WHERE a.task_id = u.task_id
            AND (a.task_id, a.generation) NOT IN (SELECT k.task_id, k.generation FROM attempts k)
    ) AS held
FROM unnest($1::uuid[], $2::uuid[]) WITH ORDINALITY AS u (token, task_id, ordinal)
ORDER BY u.ordinal
