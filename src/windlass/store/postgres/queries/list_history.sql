-- list_history: completed and cancelled tasks, newest first.
-- $1 type, $2 queue, $3 tag, $4 created_from, $5 created_until, $6 before, $7 limit, $8 status
SELECT
    t.id, t.type, t.queue, t.payload, t.status::text AS status, t.priority, t.idempotency_key,
    t.worker_id, t.created_at, t.scheduled_for, t.claimed_at, t.started_at, t.completed_at,
    t.completed_at AS updated_at, t.attempts, t.max_attempts, t.last_error, t.result, t.tags,
    t.generation, t.errors
FROM windlass.history t
WHERE ($1::text IS NULL OR t.type = $1)
    AND ($2::text IS NULL OR t.queue = $2)
    AND ($3::text IS NULL OR $3 = ANY (t.tags))
    AND ($4::timestamptz IS NULL OR t.created_at >= $4)
    AND ($5::timestamptz IS NULL OR t.created_at < $5)
    AND ($6::uuid IS NULL OR t.id < $6)
    AND (t.status = $8::text::windlass.task_status)
ORDER BY t.id DESC
LIMIT $7
