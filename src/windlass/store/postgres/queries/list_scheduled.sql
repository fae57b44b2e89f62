-- list_scheduled: tasks that wait for their time, newest first, out of the next 10000; the last of those is
-- returned (`is_last`) whether it fits or not.
-- $1 lanes (NULL: all), $2 before, $3 not_before, $4 created_from, $5 created_until, $6 limit
SELECT
    t.id, t.type, t.queue,
    coalesce(t.payload, (SELECT l.payload::jsonb FROM windlass.large_payload l WHERE l.task_id = t.id)) AS payload,
    'scheduled' AS status, t.priority, t.idempotency_key,
    NULL::uuid AS worker_id, t.created_at, t.scheduled_for,
    NULL::timestamptz AS claimed_at, NULL::timestamptz AS started_at, NULL::timestamptz AS completed_at,
    t.created_at AS updated_at,
    t.attempts, t.max_attempts,
    CASE WHEN t.generation > 1 THEN windlass.folded_attempts(t.id) -> -1 ->> 'message' END AS last_error,
    NULL::jsonb AS result, t.tags, t.generation,
    CASE WHEN t.generation > 1 THEN windlass.folded_attempts(t.id) END AS errors,
    p.fits AND t.created_at >= $4 AND t.created_at < $5 AS fits, p.is_last
FROM (
    SELECT
        k.task_id, $1::bigint[] IS NULL OR k.lane = ANY ($1) AS fits,
        row_number() OVER (ORDER BY k.task_id DESC) = 10000 AS is_last
    FROM (
        SELECT w.task_id, w.lane
        FROM windlass.scheduled w
        WHERE w.task_id < $2 AND w.task_id >= $3
        ORDER BY w.task_id DESC
        LIMIT 10000
    ) k
) p
JOIN windlass.task t ON t.id = ANY (ARRAY[p.task_id])
WHERE p.is_last OR (p.fits AND t.created_at >= $4 AND t.created_at < $5)
ORDER BY p.task_id DESC
LIMIT $6
