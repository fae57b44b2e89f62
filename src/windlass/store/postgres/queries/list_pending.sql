-- list_pending: tasks that are ready, newest first.
-- $1 type, $2 queue, $3 tag, $4 created_from, $5 created_until, $6 before, $7 limit, $8 status
SELECT
    t.id, t.type, t.queue, t.payload, 'pending' AS status, t.priority, t.idempotency_key,
    NULL::uuid AS worker_id, t.created_at, t.scheduled_for,
    NULL::timestamptz AS claimed_at, NULL::timestamptz AS started_at, NULL::timestamptz AS completed_at,
    t.created_at AS updated_at,
    t.attempts, t.max_attempts,
    CASE WHEN t.generation > 1 THEN windlass.folded_attempts(t.id) -> -1 ->> 'message' END AS last_error,
    NULL::jsonb AS result, t.tags, t.generation,
    CASE WHEN t.generation > 1 THEN windlass.folded_attempts(t.id) END AS errors
FROM windlass.ready p
JOIN windlass.task t ON t.id = p.task_id
WHERE ($1::text IS NULL OR t.type = $1)
    AND ($2::text IS NULL OR t.queue = $2)
    AND ($3::text IS NULL OR $3 = ANY (t.tags))
    AND ($4::timestamptz IS NULL OR t.created_at >= $4)
    AND ($5::timestamptz IS NULL OR t.created_at < $5)
    AND ($6::uuid IS NULL OR t.id < $6)
    AND ($8::text = 'pending')
ORDER BY t.id DESC
LIMIT $7
