-- Tasks of types that no worker knows: where somebody asked for it, the leader fails them after a while.

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
