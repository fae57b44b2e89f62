-- list_pending_few: tasks of some lanes that are ready, newest first; of lanes that hold few together, for
-- all of them are looked at.
-- $1 lanes, $2 before, $3 not_before, $4 created_from, $5 created_until, $6 limit
SELECT
    t.id, t.type, t.queue,
    coalesce(t.payload, (SELECT l.payload::jsonb FROM windlass.large_payload l WHERE l.task_id = t.id)) AS payload,
    'pending' AS status, t.priority, t.idempotency_key,
    NULL::uuid AS worker_id, t.created_at, t.scheduled_for,
    NULL::timestamptz AS claimed_at, NULL::timestamptz AS started_at, NULL::timestamptz AS completed_at,
    t.created_at AS updated_at,
    t.attempts, t.max_attempts,
    CASE WHEN t.generation > 1 THEN windlass.folded_attempts(t.id) -> -1 ->> 'message' END AS last_error,
    NULL::jsonb AS result, t.tags, t.generation,
    CASE WHEN t.generation > 1 THEN windlass.folded_attempts(t.id) END AS errors,
    true AS fits, false AS is_last
FROM (
    SELECT r.task_id
    FROM unnest($1::bigint[]) AS l (lane)
    CROSS JOIN LATERAL (
        SELECT r.task_id
        FROM windlass.ready r
        WHERE r.lane = l.lane
        ORDER BY r.x DESC, r.n DESC  -- for its index: by that of the ids every task would be looked at
        LIMIT 10000
    ) r
    WHERE r.task_id < $2 AND r.task_id >= $3
    ORDER BY r.task_id DESC
    OFFSET 0
) k
JOIN windlass.task t ON t.id = ANY (ARRAY[k.task_id])
WHERE t.created_at >= $4 AND t.created_at < $5
ORDER BY k.task_id DESC
LIMIT $6
