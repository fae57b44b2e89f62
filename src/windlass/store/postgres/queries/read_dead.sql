-- read_dead: those of these tasks that are failed or dead, with their lineage. $1 task_ids
SELECT
    d.id, d.type, d.queue,
    coalesce(d.payload, (SELECT l.payload::jsonb FROM windlass.large_payload l WHERE l.task_id = d.id)) AS payload,
    d.status::text AS status, d.priority, d.idempotency_key,
    d.worker_id, d.created_at, d.scheduled_for, d.claimed_at, d.started_at, d.completed_at,
    d.completed_at AS updated_at, d.attempts, d.max_attempts, d.last_error, d.result, d.tags,
    d.generation, d.errors,
    p.ancestor AS replay_of, coalesce(p.depth, 0) AS depth,
    ARRAY(
        SELECT r.task_id::text
        FROM windlass.replay r
        WHERE r.ancestor = d.id AND r.generation = d.generation
        ORDER BY r.replayed_at, r.task_id
    ) AS replayed_as
FROM unnest($1::uuid[]) WITH ORDINALITY AS u (id, ordinal)
JOIN windlass.dead d ON d.id = ANY (ARRAY[u.id])
LEFT JOIN windlass.replay p ON p.task_id = ANY (ARRAY[d.id])
ORDER BY u.ordinal
