-- list_claimed: tasks that workers hold, claimed or running, newest first.
-- $1 type, $2 queue, $3 tag, $4 created_from, $5 created_until, $6 before, $7 limit, $8 status
SELECT
    t.id, t.type, t.queue, t.payload, CASE WHEN r.task_id IS NULL THEN 'claimed' ELSE 'running' END AS status, t.priority, t.idempotency_key,
    c.worker_id, t.created_at, t.scheduled_for,
    c.claimed_at, r.started_at, NULL::timestamptz AS completed_at,
    greatest(t.created_at, c.claimed_at, r.started_at) AS updated_at,
    t.attempts, t.max_attempts,
    CASE WHEN t.generation > 1 THEN windlass.folded_attempts(t.id) -> -1 ->> 'message' END AS last_error,
    NULL::jsonb AS result, t.tags, t.generation,
    CASE WHEN t.generation > 1 THEN windlass.folded_attempts(t.id) END AS errors
FROM windlass.claim c
JOIN windlass.claim_task b ON b.token = c.token
CROSS JOIN LATERAL unnest(b.task_ids, b.generations) AS k (task_id, generation)
JOIN windlass.task t ON t.id = k.task_id AND t.generation = k.generation
LEFT JOIN windlass.running r ON r.task_id = t.id AND r.generation = t.generation
WHERE ($1::text IS NULL OR t.type = $1)
    AND ($2::text IS NULL OR t.queue = $2)
    AND ($3::text IS NULL OR $3 = ANY (t.tags))
    AND ($4::timestamptz IS NULL OR t.created_at >= $4)
    AND ($5::timestamptz IS NULL OR t.created_at < $5)
    AND ($6::uuid IS NULL OR t.id < $6)
    AND ($8::text = CASE WHEN r.task_id IS NULL THEN 'claimed' ELSE 'running' END)
ORDER BY t.id DESC
LIMIT $7
