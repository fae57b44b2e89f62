-- list_dead: failed or dead tasks, newest first, out of the next 10000; the last of those is
-- returned (`is_last`) whether it fits or not.
-- Only the index on (status, id) has this order: by id alone, few of a status would lie among many.
-- $1 status, $2 type, $3 queue, $4 before, $5 not_before, $6 created_from, $7 created_until, $8 limit
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
        ($2::text IS NULL OR k.type = $2) AND ($3::text IS NULL OR k.queue = $3)
            AND k.created_at >= $6 AND k.created_at < $7 AS fits,
        row_number() OVER (ORDER BY k.status DESC, k.id DESC) = 10000 AS is_last
    FROM (
        SELECT
            e.id, e.type, e.queue, e.payload, e.status, e.priority, e.idempotency_key, e.worker_id,
            e.created_at, e.scheduled_for, e.claimed_at, e.started_at, e.completed_at, e.attempts,
            e.max_attempts, e.last_error, e.result, e.tags, e.generation, e.errors
        FROM windlass.dead e
        WHERE (e.status, e.id) < ($1::text::windlass.task_status, $4)
            AND (e.status, e.id) >= ($1::text::windlass.task_status, $5)
        ORDER BY e.status DESC, e.id DESC
        LIMIT 10000
    ) k
) t
WHERE t.fits OR t.is_last
ORDER BY t.status DESC, t.id DESC
LIMIT $8
