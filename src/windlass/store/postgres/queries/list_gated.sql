-- list_gated: tasks that wait at a gate, newest first, out of the next 10000; the last of those is returned
-- (`is_last`) whether it fits or not.
-- $1 statuses, $2 type, $3 queue, $4 before, $5 not_before, $6 created_from, $7 created_until, $8 limit
SELECT
    t.id, t.type, t.queue,
    coalesce(t.payload, (SELECT l.payload::jsonb FROM windlass.large_payload l WHERE l.task_id = t.id)) AS payload,
    k.status, t.priority, t.idempotency_key,
    NULL::uuid AS worker_id, t.created_at, t.scheduled_for,
    NULL::timestamptz AS claimed_at, NULL::timestamptz AS started_at, NULL::timestamptz AS completed_at,
    t.created_at AS updated_at,
    t.attempts, t.max_attempts,
    CASE WHEN t.generation > 1 THEN windlass.folded_attempts(t.id) -> -1 ->> 'message' END AS last_error,
    NULL::jsonb AS result, t.tags, t.generation,
    CASE WHEN t.generation > 1 THEN windlass.folded_attempts(t.id) END AS errors,
    k.fits, p.is_last
FROM (
    SELECT e.task_id, row_number() OVER (ORDER BY e.task_id DESC) = 10000 AS is_last
    FROM (
        SELECT w.task_id
        FROM windlass.gate_entry w
        WHERE w.task_id < $4 AND w.task_id >= $5 AND NOT w.is_open
        ORDER BY w.task_id DESC
        LIMIT 10000
    ) e
) p
JOIN windlass.task t ON t.id = ANY (ARRAY[p.task_id])
CROSS JOIN LATERAL (
    SELECT s.status, f.fits AND s.status = ANY ($1::text[]) AS fits
    FROM (
        SELECT ($2::text IS NULL OR t.type = $2) AND ($3::text IS NULL OR t.queue = $3)
            AND t.created_at >= $6 AND t.created_at < $7 AS fits
    ) f
    -- Only of those that fit: each takes several looks.
    CROSS JOIN LATERAL (
        SELECT CASE WHEN f.fits THEN windlass.gate_status(t.id)::text ELSE 'blocked' END AS status
    ) s
    OFFSET 0
) k
WHERE p.is_last OR k.fits
ORDER BY p.task_id DESC
LIMIT $8
