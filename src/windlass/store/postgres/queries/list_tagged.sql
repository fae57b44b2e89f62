-- list_tagged: tasks with a tag wherever they are, newest first, out of the next 1000 (or `limit`,
-- if that is more); if there may be more, a last row (`is_last`) has the id alone of the last of those.
-- $1 tag, $2 statuses (NULL: all), $3 type, $4 queue, $5 before, $6 not_before, $7 created_from,
-- $8 created_until, $9 limit
WITH tagged AS MATERIALIZED (
    SELECT
        k.task_id,
        row_number() OVER (ORDER BY k.task_id DESC) = greatest(1000, $9::bigint) AS is_last
    FROM (
        SELECT g.task_id
        FROM windlass.task_tag g
        WHERE g.tag = $1 AND g.task_id < $5 AND g.task_id >= $6
        ORDER BY g.task_id DESC
        LIMIT greatest(1000, $9::bigint)
    ) k
), live AS MATERIALIZED (
    SELECT t.*
    FROM tagged k
    JOIN windlass.task t ON t.id = ANY (ARRAY[k.task_id])
), held AS MATERIALIZED (
    SELECT c.worker_id, c.claimed_at, u.task_id, u.generation
    FROM windlass.claim c
    JOIN windlass.claim_task b ON b.token = c.token
    CROSS JOIN LATERAL unnest(b.task_ids, b.generations) AS u (task_id, generation)
    WHERE u.task_id = ANY (ARRAY(SELECT t.id FROM live t))
), found AS (
    SELECT
        t.id, t.type, t.queue,
        coalesce(t.payload, (SELECT l.payload::jsonb FROM windlass.large_payload l WHERE l.task_id = t.id)) AS payload,
        CASE
            WHEN r.task_id IS NOT NULL THEN 'pending'
            WHEN s.task_id IS NOT NULL THEN 'scheduled'
            WHEN g.task_id IS NOT NULL THEN windlass.gate_status(t.id)::text
            WHEN u.task_id IS NOT NULL THEN 'running'
            ELSE 'claimed'
        END AS status,
        t.priority, t.idempotency_key, h.worker_id, t.created_at, t.scheduled_for, h.claimed_at,
        u.started_at, NULL::timestamptz AS completed_at,
        greatest(t.created_at, h.claimed_at, u.started_at) AS updated_at,
        t.attempts, t.max_attempts,
        CASE WHEN t.generation > 1 THEN windlass.folded_attempts(t.id) -> -1 ->> 'message' END AS last_error,
        NULL::jsonb AS result, t.tags, t.generation,
        CASE WHEN t.generation > 1 THEN windlass.folded_attempts(t.id) END AS errors
    FROM live t
    LEFT JOIN windlass.ready r ON r.task_id = ANY (ARRAY[t.id])
    LEFT JOIN windlass.scheduled s ON s.task_id = ANY (ARRAY[t.id])
    LEFT JOIN windlass.gate_entry g ON g.task_id = ANY (ARRAY[t.id]) AND NOT g.is_open
    LEFT JOIN windlass.running u ON u.task_id = ANY (ARRAY[t.id]) AND u.generation = t.generation
    LEFT JOIN held h ON h.task_id = t.id AND h.generation = t.generation
    UNION ALL
    SELECT
        t.id, t.type, t.queue,
        coalesce(t.payload, (SELECT l.payload::jsonb FROM windlass.large_payload l WHERE l.task_id = t.id)) AS payload,
        t.status::text, t.priority, t.idempotency_key, t.worker_id,
        t.created_at, t.scheduled_for, t.claimed_at, t.started_at, t.completed_at, t.completed_at,
        t.attempts, t.max_attempts, t.last_error, t.result, t.tags, t.generation, t.errors
    FROM windlass.history t
    WHERE t.id = ANY (ARRAY(SELECT k.task_id FROM tagged k))
    UNION ALL
    SELECT
        t.id, t.type, t.queue,
        coalesce(t.payload, (SELECT l.payload::jsonb FROM windlass.large_payload l WHERE l.task_id = t.id)) AS payload,
        t.status::text, t.priority, t.idempotency_key, t.worker_id,
        t.created_at, t.scheduled_for, t.claimed_at, t.started_at, t.completed_at, t.completed_at,
        t.attempts, t.max_attempts, t.last_error, t.result, t.tags, t.generation, t.errors
    FROM windlass.dead t
    WHERE t.id = ANY (ARRAY(SELECT k.task_id FROM tagged k))
)
SELECT
    f.id, f.type, f.queue, f.payload, f.status, f.priority, f.idempotency_key, f.worker_id,
    f.created_at, f.scheduled_for, f.claimed_at, f.started_at, f.completed_at, f.updated_at,
    f.attempts, f.max_attempts, f.last_error, f.result, f.tags, f.generation, f.errors,
    true AS fits, false AS is_last
FROM found f
WHERE ($2::text[] IS NULL OR f.status = ANY ($2))
    AND ($3::text IS NULL OR f.type = $3)
    AND ($4::text IS NULL OR f.queue = $4)
    AND f.created_at >= $7 AND f.created_at < $8
UNION ALL
SELECT
    k.task_id, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
    NULL, NULL, NULL, NULL, NULL, NULL, false, true
FROM tagged k
WHERE k.is_last
ORDER BY id DESC, is_last
LIMIT $9
