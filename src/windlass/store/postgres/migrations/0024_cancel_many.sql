-- Cancelling many tasks in one transaction.

-- end_cancelled: end tasks whose rows are held; their places are gone. They say why.
CREATE FUNCTION windlass.end_cancelled(ended uuid[], why text, retention interval, key_retention interval) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
SET jit = off
AS $$
DECLARE
    at constant timestamptz := windlass.clock();
BEGIN
    WITH gone AS (
        DELETE FROM windlass.task t WHERE t.id = ANY (ended) RETURNING t.*
    ), filed AS (
        INSERT INTO windlass.history (
            id, type, queue, status, priority, max_attempts, attempts, generation,
            retention_seconds, drop_on, created_at, scheduled_for, completed_at,
            idempotency_key, payload, tags, last_error, errors
        )
        SELECT
            g.id, g.type, g.queue, 'cancelled', g.priority, g.max_attempts, g.attempts, g.generation,
            g.retention_seconds,
            windlass.drop_day(at, g.retention_seconds, retention, g.idempotency_key, key_retention),
            g.created_at, g.scheduled_for, at, g.idempotency_key, g.payload, g.tags, why,
            windlass.folded_attempts(g.id)
        FROM gone g
    ), answered AS (
        DELETE FROM windlass.cancel_request q USING gone g WHERE q.task_id = ANY (ARRAY[g.id])
    )
    DELETE FROM windlass.attempt a USING gone g WHERE a.task_id = ANY (ARRAY[g.id]);
END
$$;

-- cancel_task: as before.
CREATE OR REPLACE FUNCTION windlass.cancel_task(
    cancelled uuid, why text, retention interval, key_retention interval
) RETURNS text
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    claimed integer;
BEGIN
    FOR turn IN 1..100 LOOP
        IF windlass.take_waiting(cancelled) THEN
            PERFORM windlass.end_cancelled(ARRAY[cancelled], why, retention, key_retention);
            RETURN 'cancelled';
        END IF;
        SELECT t.generation INTO claimed FROM windlass.task t WHERE t.id = cancelled;
        EXIT WHEN NOT FOUND;
        INSERT INTO windlass.cancel_request (task_id, reason, requested_at)
        VALUES (cancelled, why, windlass.clock())
        ON CONFLICT DO NOTHING;
        -- The insert may have waited for whoever reopened the task: what runs is another generation now.
        IF EXISTS (
            SELECT FROM windlass.task t WHERE t.id = cancelled AND t.generation = claimed
        ) THEN
            RETURN 'requested';
        END IF;
        DELETE FROM windlass.cancel_request q WHERE q.task_id = cancelled;
    END LOOP;
    IF EXISTS (SELECT FROM windlass.history h WHERE h.id = cancelled)
        OR EXISTS (SELECT FROM windlass.dead d WHERE d.id = cancelled) THEN
        RETURN 'ended';
    END IF;
    RETURN NULL;
END
$$;

-- expire_tasks: as before.
CREATE OR REPLACE FUNCTION windlass.expire_tasks(max_tasks integer, retention interval, key_retention interval)
RETURNS TABLE (cancelled integer, has_more boolean)
LANGUAGE plpgsql
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
SET jit = off
AS $$
DECLARE
    late uuid[];
    waiting uuid[];
    taken uuid[];
    done integer;
    latest constant timestamptz := windlass.clock();
BEGIN
    SELECT coalesce(array_agg(l.task_id), '{}') INTO late
    FROM (
        SELECT e.task_id
        FROM windlass.expiry e
        WHERE e.expires_at <= latest
        ORDER BY e.expires_at
        LIMIT max_tasks
        FOR UPDATE SKIP LOCKED
    ) l;

    SELECT coalesce(array_agg(f.task_id), '{}') INTO waiting
    FROM (
        SELECT r.task_id FROM windlass.ready r WHERE r.task_id = ANY (late)
        ORDER BY r.task_id FOR UPDATE SKIP LOCKED
    ) f;
    SELECT waiting || coalesce(array_agg(f.task_id), '{}') INTO waiting
    FROM (
        SELECT s.task_id FROM windlass.scheduled s WHERE s.task_id = ANY (late)
        ORDER BY s.task_id FOR UPDATE SKIP LOCKED
    ) f;
    SELECT coalesce(array_agg(f.id), '{}') INTO taken
    FROM (
        SELECT t.id FROM windlass.task t WHERE t.id = ANY (waiting) AND t.attempts = 0
        ORDER BY t.id FOR UPDATE SKIP LOCKED
    ) f;
    DELETE FROM windlass.ready r WHERE r.task_id = ANY (taken);
    DELETE FROM windlass.scheduled s WHERE s.task_id = ANY (taken);
    PERFORM windlass.end_cancelled(taken, 'expired: it was not started in time', retention, key_retention);

    -- What was cancelled, has ended or has begun does not expire any more.
    DELETE FROM windlass.expiry e
    WHERE e.task_id = ANY (late) AND (
        NOT EXISTS (SELECT FROM windlass.task t WHERE t.id = ANY (ARRAY[e.task_id]) AND t.attempts = 0)
        OR EXISTS (
            SELECT
            FROM windlass.running r
            JOIN windlass.task t ON t.id = ANY (ARRAY[r.task_id]) AND t.generation = r.generation
            WHERE r.task_id = ANY (ARRAY[e.task_id])
        )
    );
    GET DIAGNOSTICS done = ROW_COUNT;
    IF cardinality(late) = max_tasks THEN
        -- What is left is claimed, or somebody holds it: it is as late as can be, and not to hide the others.
        UPDATE windlass.expiry e SET expires_at = latest WHERE e.task_id = ANY (late);
    END IF;
    RETURN QUERY SELECT cardinality(taken), done > 0 AND cardinality(late) = max_tasks;
END
$$;

-- cancel_tasks: do to each of these tasks what cancel_task does to one, and go round what somebody holds. Answers for
-- each: cancelled, requested or ended; held, if it is to be asked for again, because somebody holds it or it moved
-- meanwhile; NULL if nobody knows it. Writes requests, then locks waiting rows, then tasks, each sorted by id.
CREATE FUNCTION windlass.cancel_tasks(cancelled uuid[], why text, retention interval, key_retention interval)
RETURNS TABLE (task_id uuid, answer text)
LANGUAGE plpgsql
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
SET jit = off
SET lock_timeout = '100ms'
AS $$
#variable_conflict use_column
DECLARE
    claimed uuid[];
    generations integer[];
    added uuid[] := '{}';  -- requests that are new
    held uuid[] := '{}';
    requested uuid[];
    waiting uuid[];
    taken uuid[];
    one uuid;
BEGIN
    SELECT coalesce(array_agg(c.id), '{}'), coalesce(array_agg(c.generation), '{}') INTO claimed, generations
    FROM (
        SELECT t.id, t.generation
        FROM windlass.task t
        WHERE t.id = ANY (cancelled)
            AND NOT EXISTS (SELECT FROM windlass.scheduled s WHERE s.task_id = ANY (ARRAY[t.id]))
            AND NOT EXISTS (SELECT FROM windlass.ready r WHERE r.task_id = ANY (ARRAY[t.id]))
        ORDER BY t.id
    ) c;

    -- First of all: to write a request may mean to wait for somebody who writes one of the same task, and who might
    -- wait for a row that we hold by then.
    BEGIN
        WITH new AS (
            INSERT INTO windlass.cancel_request (task_id, reason, requested_at)
            SELECT c.id, why, windlass.clock() FROM unnest(claimed) AS c (id)
            ON CONFLICT DO NOTHING
            RETURNING task_id
        )
        SELECT coalesce(array_agg(n.task_id), '{}') INTO added FROM new n;
    EXCEPTION WHEN lock_not_available THEN
        PERFORM set_config('lock_timeout', '1ms', true);  -- for each that is held: it may be all of them
        FOREACH one IN ARRAY claimed LOOP
            BEGIN
                INSERT INTO windlass.cancel_request (task_id, reason, requested_at)
                VALUES (one, why, windlass.clock())
                ON CONFLICT DO NOTHING;
                IF FOUND THEN
                    added := added || one;
                END IF;
            EXCEPTION WHEN lock_not_available THEN
                held := held || one;
            END;
        END LOOP;
        PERFORM set_config('lock_timeout', '100ms', true);
    END;
    -- A request is for the generation that was seen: another one may run, or wait, by now.
    SELECT coalesce(array_agg(t.id), '{}') INTO requested
    FROM unnest(claimed, generations) AS c (id, generation)
    JOIN windlass.task t ON t.id = ANY (ARRAY[c.id]) AND t.generation = c.generation
    WHERE c.id <> ALL (held);
    DELETE FROM windlass.cancel_request q WHERE q.task_id = ANY (added) AND q.task_id <> ALL (requested);

    SELECT coalesce(array_agg(f.task_id), '{}') INTO waiting
    FROM (
        SELECT s.task_id FROM windlass.scheduled s WHERE s.task_id = ANY (cancelled)
        ORDER BY s.task_id FOR UPDATE SKIP LOCKED
    ) f;
    SELECT waiting || coalesce(array_agg(f.task_id), '{}') INTO waiting
    FROM (
        SELECT r.task_id FROM windlass.ready r WHERE r.task_id = ANY (cancelled)
        ORDER BY r.task_id FOR UPDATE SKIP LOCKED
    ) f;
    SELECT coalesce(array_agg(f.id), '{}') INTO taken
    FROM (
        SELECT t.id FROM windlass.task t WHERE t.id = ANY (waiting)
        ORDER BY t.id FOR UPDATE SKIP LOCKED
    ) f;
    DELETE FROM windlass.scheduled s WHERE s.task_id = ANY (taken);
    DELETE FROM windlass.ready r WHERE r.task_id = ANY (taken);
    PERFORM windlass.end_cancelled(taken, why, retention, key_retention);

    RETURN QUERY
    SELECT c.id, CASE
        WHEN c.id = ANY (taken) THEN 'cancelled'
        WHEN c.id = ANY (requested) THEN 'requested'
        WHEN EXISTS (SELECT FROM windlass.task t WHERE t.id = ANY (ARRAY[c.id])) THEN 'held'
        WHEN EXISTS (SELECT FROM windlass.history h WHERE h.id = ANY (ARRAY[c.id]))
            OR EXISTS (SELECT FROM windlass.dead d WHERE d.id = ANY (ARRAY[c.id])) THEN 'ended'
    END
    FROM unnest(cancelled) AS c (id);
END
$$;
