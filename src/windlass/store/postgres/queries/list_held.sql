-- list_held: tasks that workers hold, claimed or running, newest first.
-- $1 statuses, $2 type, $3 queue, $4 before, $5 not_before, $6 created_from, $7 created_until, $8 limit
SELECT
    t.id, t.type, t.queue,
    coalesce(t.payload, (SELECT l.payload::jsonb FROM windlass.large_payload l WHERE l.task_id = t.id)) AS payload,
    k.status, t.priority, t.idempotency_key,
    k.worker_id, t.created_at, t.scheduled_for,
    k.claimed_at, k.started_at, NULL::timestamptz AS completed_at,
    greatest(t.created_at, k.claimed_at, k.started_at) AS updated_at,
    t.attempts, t.max_attempts,
    CASE WHEN t.generation > 1 THEN windlass.folded_attempts(t.id) -> -1 ->> 'message' END AS last_error,
    NULL::jsonb AS result, t.tags, t.generation,
    CASE WHEN t.generation > 1 THEN windlass.folded_attempts(t.id) END AS errors,
    true AS fits, false AS is_last
FROM (
    SELECT
        c.worker_id, c.claimed_at, u.task_id, u.generation, r.started_at,
        CASE WHEN r.task_id IS NULL THEN 'claimed' ELSE 'running' END AS status
    FROM windlass.claim c
    JOIN windlass.claim_task b ON b.token = c.token
    CROSS JOIN LATERAL unnest(b.task_ids, b.generations) AS u (task_id, generation)
    LEFT JOIN windlass.running r ON r.task_id = ANY (ARRAY[u.task_id]) AND r.generation = u.generation
    WHERE u.task_id < $4 AND u.task_id >= $5
) k
JOIN windlass.task t ON t.id = ANY (ARRAY[k.task_id]) AND t.generation = k.generation
WHERE k.status = ANY ($1::text[])
    AND ($2::text IS NULL OR t.type = $2)
    AND ($3::text IS NULL OR t.queue = $3)
    AND t.created_at >= $6 AND t.created_at < $7
ORDER BY k.task_id DESC
LIMIT $8
