-- read_task: one whole task, live or ended. $1 task_id
SELECT
    v.id, v.type, v.queue, v.payload, v.status::text AS status, v.priority, v.idempotency_key,
    v.worker_id, v.created_at, v.scheduled_for, v.claimed_at, v.started_at, v.completed_at,
    v.updated_at, v.attempts, v.max_attempts, v.last_error, v.result, v.tags, v.generation,
    coalesce(
        (SELECT h.errors FROM windlass.history h WHERE h.id = $1),
        (SELECT d.errors FROM windlass.dead d WHERE d.id = $1),
        windlass.folded_attempts($1)
    ) AS errors,
    (SELECT r.ancestor FROM windlass.replay r WHERE r.task_id = $1) AS replay_of
FROM windlass.tasks v
WHERE v.id = $1
