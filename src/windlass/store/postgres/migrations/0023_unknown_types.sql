-- Tasks of types that no worker knows: where somebody asked for it, the leader fails them after a while.
-- And what the view of all tasks did not show.

-- unknown_types: the types of ready tasks that no registered worker knows; those in paused queues wait for somebody.
CREATE FUNCTION windlass.unknown_types() RETURNS SETOF text
LANGUAGE sql STABLE
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
SET jit = off
AS $$
SELECT DISTINCT l.type
FROM windlass.lane l
CROSS JOIN LATERAL (SELECT FROM windlass.ready r WHERE r.lane = l.lane LIMIT 1) r
WHERE NOT EXISTS (SELECT FROM windlass.worker w WHERE l.type = ANY (w.types))
    AND NOT EXISTS (SELECT FROM windlass.queue q WHERE q.name = l.queue AND q.paused_at IS NOT NULL)
ORDER BY l.type
$$;

-- fail_unknown: fail tasks of a type that have been ready for so long, if no registered worker knows it; returns
-- which. Who holds one is gone round. Locks ready rows, then tasks.
CREATE FUNCTION windlass.fail_unknown(
    unknown text, error jsonb, ready_for interval, max_tasks integer, dead_retention interval, key_retention interval
) RETURNS uuid[]
LANGUAGE plpgsql
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
SET jit = off
AS $$
DECLARE
    waiting uuid[];
    failed uuid[];
    at timestamptz := windlass.clock();
    latest constant timestamptz := at - ready_for;
BEGIN
    SELECT array_agg(w.task_id) INTO waiting
    FROM (
        SELECT r.task_id
        FROM (SELECT DISTINCT l.lane, l.queue FROM windlass.lane l WHERE l.type = unknown) l
        CROSS JOIN LATERAL (
            -- The first ones, whatever comes after: none but the first may have waited for long.
            SELECT k.task_id, k.ready_at
            FROM windlass.ready k
            WHERE k.lane = l.lane
            ORDER BY k.lane, k.x, k.n
            LIMIT max_tasks
        ) r
        WHERE r.ready_at <= latest
            AND NOT EXISTS (SELECT FROM windlass.queue q WHERE q.name = l.queue AND q.paused_at IS NOT NULL)
        LIMIT max_tasks
    ) w;
    IF waiting IS NULL THEN
        RETURN '{}';
    END IF;
    SELECT array_agg(f.task_id) INTO failed
    FROM (
        SELECT r.task_id FROM windlass.ready r WHERE r.task_id = ANY (waiting)
        ORDER BY r.task_id FOR UPDATE SKIP LOCKED
    ) f;
    -- After the lock: from now on nobody can claim them, so a worker that came meanwhile is seen or comes too late.
    IF failed IS NULL OR EXISTS (SELECT FROM windlass.worker w WHERE unknown = ANY (w.types)) THEN
        RETURN '{}';
    END IF;
    DELETE FROM windlass.ready r WHERE r.task_id = ANY (failed);
    at := windlass.clock();
    WITH gone AS (
        DELETE FROM windlass.task t WHERE t.id = ANY (failed) RETURNING t.*
    ), kept AS (
        INSERT INTO windlass.dead (
            id, type, queue, status, priority, max_attempts, attempts, generation,
            retention_seconds, drop_on, created_at, scheduled_for, completed_at,
            idempotency_key, payload, tags, last_error, errors
        )
        SELECT
            g.id, g.type, g.queue, 'failed', g.priority, g.max_attempts, g.attempts + 1, g.generation,
            g.retention_seconds,
            windlass.drop_day(at, g.retention_seconds, dead_retention, g.idempotency_key, key_retention),
            g.created_at, g.scheduled_for, at, g.idempotency_key, g.payload, g.tags,
            error ->> 'message',
            coalesce(windlass.folded_attempts(g.id), '[]') || jsonb_build_array(
                error || jsonb_build_object(
                    'attempt', g.attempts + 1, 'generation', g.generation,
                    'worker_id', NULL, 'started_at', NULL, 'ended_at', at
                )
            )
        FROM gone g
    ), answered AS (
        DELETE FROM windlass.cancel_request q USING gone g WHERE q.task_id = g.id
    )
    DELETE FROM windlass.attempt a USING gone g WHERE a.task_id = g.id;
    PERFORM windlass.call_back(failed);
    RETURN failed;
END
$$;

-- The class of the last error, and the dead letter that a task was made of, for people who ask by SQL.
CREATE OR REPLACE VIEW windlass.tasks AS
SELECT
    t.id, t.type, t.queue,
    coalesce(t.payload, (SELECT l.payload::jsonb FROM windlass.large_payload l WHERE l.task_id = t.id)) AS payload,
    (CASE
        WHEN r.task_id IS NOT NULL THEN 'pending'
        WHEN s.task_id IS NOT NULL THEN 'scheduled'
        WHEN u.task_id IS NOT NULL THEN 'running'
        ELSE 'claimed'
    END)::windlass.task_status AS status,
    t.priority, t.idempotency_key,
    c.worker_id, t.created_at, t.scheduled_for, c.claimed_at, u.started_at,
    NULL::timestamptz AS completed_at,
    greatest(t.created_at, c.claimed_at, u.started_at, a.ended_at) AS updated_at,
    t.attempts, t.max_attempts,
    a.error ->> 'message' AS last_error,
    NULL::jsonb AS result,
    t.tags, t.generation,
    a.error ->> 'class' AS error_class,
    (SELECT p.ancestor FROM windlass.replay p WHERE p.task_id = t.id) AS replay_of
FROM windlass.task t
LEFT JOIN windlass.ready r ON r.task_id = t.id
LEFT JOIN windlass.scheduled s ON s.task_id = t.id
LEFT JOIN windlass.running u ON u.task_id = t.id AND u.generation = t.generation
LEFT JOIN (
    SELECT c.worker_id, c.claimed_at, k.task_id, k.generation
    FROM windlass.claim c
    JOIN windlass.claim_task b ON b.token = c.token
    CROSS JOIN LATERAL unnest(b.task_ids, b.generations) AS k (task_id, generation)
) c ON c.task_id = t.id AND c.generation = t.generation
LEFT JOIN LATERAL (
    SELECT f.error, f.ended_at
    FROM windlass.attempt f
    WHERE t.generation > 1 AND f.task_id = t.id
    ORDER BY f.generation DESC
    LIMIT 1
) a ON true
UNION ALL
SELECT
    h.id, h.type, h.queue,
    coalesce(h.payload, (SELECT l.payload::jsonb FROM windlass.large_payload l WHERE l.task_id = h.id)),
    h.status, h.priority, h.idempotency_key, h.worker_id,
    h.created_at, h.scheduled_for, h.claimed_at, h.started_at, h.completed_at, h.completed_at,
    h.attempts, h.max_attempts, h.last_error, h.result, h.tags, h.generation,
    h.errors -> -1 ->> 'class',
    (SELECT p.ancestor FROM windlass.replay p WHERE p.task_id = h.id)
FROM windlass.history h
UNION ALL
SELECT
    d.id, d.type, d.queue,
    coalesce(d.payload, (SELECT l.payload::jsonb FROM windlass.large_payload l WHERE l.task_id = d.id)),
    d.status, d.priority, d.idempotency_key, d.worker_id,
    d.created_at, d.scheduled_for, d.claimed_at, d.started_at, d.completed_at, d.completed_at,
    d.attempts, d.max_attempts, d.last_error, d.result, d.tags, d.generation,
    d.errors -> -1 ->> 'class',
    (SELECT p.ancestor FROM windlass.replay p WHERE p.task_id = d.id)
FROM windlass.dead d;
