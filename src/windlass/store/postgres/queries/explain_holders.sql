-- explain_holders: some tasks that count for a limit of concurrency, those of the oldest claims.
-- What a claim has given back is still among its tasks: those are of a later generation, or gone.
-- $1 scope, $2 name, $3 how many
SELECT k.task_id, h.worker_id, h.claimed_at
FROM (
    SELECT c.token, c.fence, c.worker_id, c.claimed_at, l.task_ids
    FROM windlass.claim_limit l
    JOIN windlass.claim c ON c.token = ANY (ARRAY[l.token])
    WHERE l.scope = $1 AND l.name = $2
    ORDER BY c.fence
    LIMIT $3
) h
JOIN windlass.claim_task b ON b.token = ANY (ARRAY[h.token])
CROSS JOIN LATERAL (
    SELECT u.task_id
    FROM unnest(b.task_ids, b.generations) AS u (task_id, generation)
    JOIN windlass.task t ON t.id = ANY (ARRAY[u.task_id]) AND t.generation = u.generation
    WHERE h.task_ids IS NULL OR u.task_id = ANY (h.task_ids)
    LIMIT $3
) k
ORDER BY h.fence, k.task_id
LIMIT $3
