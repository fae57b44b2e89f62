-- list_cancelled: cancelled tasks, by the index of these alone, newest first, out of the next 10000; the last of those is
-- returned (`is_last`) whether it fits or not.
-- $1 type, $2 queue, $3 before, $4 not_before, $5 created_from, $6 created_until, $7 limit
SELECT
    t.id, t.type, t.queue,
    coalesce(t.payload, (SELECT l.payload::jsonb FROM windlass.large_payload l WHERE l.task_id = t.id)) AS payload,
    t.status::text AS status, t.priority, t.idempotency_key,
    t.worker_id, t.created_at, t.scheduled_for, t.claimed_at, t.started_at, t.completed_at,
    t.completed_at AS updated_at, t.attempts, t.max_attempts, t.last_error, t.result, t.tags,
    t.generation, t.errors,
    t.fits, t.is_last
FROM (
    SELECT
        k.*,
        ($1::text IS NULL OR k.type = $1) AND ($2::text IS NULL OR k.queue = $2)
            AND k.created_at >= $5 AND k.created_at < $6 AS fits,
        row_number() OVER (ORDER BY k.id DESC) = 10000 AS is_last
    FROM (
        SELECT
            e.id, e.type, e.queue, e.payload, e.status, e.priority, e.idempotency_key, e.worker_id,
            e.created_at, e.scheduled_for, e.claimed_at, e.started_at, e.completed_at, e.attempts,
            e.max_attempts, e.last_error, e.result, e.tags, e.generation, e.errors
        FROM windlass.history e
        WHERE e.status = 'cancelled' AND e.id < $3 AND e.id >= $4
        ORDER BY e.id DESC
        LIMIT 10000
    ) k
) t
WHERE t.fits OR t.is_last
ORDER BY t.id DESC
LIMIT $7
