-- What becomes of tasks that fail: retries that come too late or are stopped, and what is enqueued at the end.

-- Types whose failed attempts are not tried again, because somebody said so.
CREATE TABLE windlass.stopped_type (
    type text PRIMARY KEY,
    reason text NOT NULL,
    stopped_at timestamptz NOT NULL
);

-- Seconds after its enqueue beyond which no attempt of a task begins: for who rescues it, and knows no more of its type.
ALTER TABLE windlass.task_type ADD COLUMN max_age float8;

-- What is enqueued when a task of the type has ended: `call`, as enqueue_many takes it, and `takes`, the names
-- of the arguments that are filled in.
ALTER TABLE windlass.task_type ADD COLUMN on_success jsonb;
ALTER TABLE windlass.task_type ADD COLUMN on_failure jsonb;

-- call_back: enqueue what follows the end of these tasks, which are completed, failed or dead.
-- In the transaction that ends them, so that both happen or neither. Where a payload would be too large or too deep,
-- the result is left out of it, and the message is cut. What cannot be enqueued even so must not keep a task from its
-- end: it is told in the server's log.
CREATE FUNCTION windlass.call_back(ended uuid[]) RETURNS void
LANGUAGE plpgsql
SET enable_seqscan = off
SET jit = off
AS $$
DECLARE
    tasks uuid[];
    calls jsonb[];
    filled jsonb[];  -- the names of the arguments that were filled in
    brief jsonb;
BEGIN
    WITH known AS MATERIALIZED (
        SELECT h.id, h.type, h.queue, h.attempts, h.result, NULL::jsonb AS error, true AS succeeded
        FROM windlass.history h
        WHERE h.id = ANY (ended) AND h.status = 'completed'
        UNION ALL
        SELECT d.id, d.type, d.queue, d.attempts, NULL, d.errors -> -1, false
        FROM windlass.dead d
        WHERE d.id = ANY (ended)
    ), template AS (
        SELECT k.*, CASE WHEN k.succeeded THEN y.on_success ELSE y.on_failure END AS said
        FROM known k
        JOIN windlass.task_type y ON y.name = k.type
    )
    SELECT array_agg(t.id), array_agg(t.said -> 'takes'), array_agg(
        (t.said -> 'call') || jsonb_build_object('payload', (t.said -> 'call' -> 'payload') || (
            SELECT coalesce(jsonb_object_agg(f.key, f.value), '{}')
            FROM jsonb_each(jsonb_build_object(
                'task_id', t.id, 'task_type', t.type, 'queue', t.queue, 'attempts', t.attempts,
                -- One that is large is left where it is: whoever wants it can ask for it.
                'result', CASE WHEN octet_length(t.result::text) <= s.max_payload_bytes / 2 THEN t.result END,
                'error', t.error - '{traceback,attempt,generation,worker_id,started_at,ended_at}'::text[]
            )) AS f
            WHERE t.said -> 'takes' ? f.key
        ))
    )
    INTO tasks, filled, calls
    FROM template t
    CROSS JOIN windlass.setting s
    WHERE t.said IS NOT NULL;
    IF calls IS NULL THEN
        RETURN;
    END IF;
    BEGIN
        PERFORM windlass.enqueue_many(to_jsonb(calls));
        RETURN;
    EXCEPTION WHEN SQLSTATE 'WL005' OR SQLSTATE 'WL006' THEN
        NULL;  -- one of them is refused: each by itself, so that it costs no other
    END;
    FOR place IN 1..cardinality(calls) LOOP
        BEGIN
            PERFORM windlass.enqueue_many(jsonb_build_array(calls[place]));
            CONTINUE;
        EXCEPTION WHEN SQLSTATE 'WL005' OR SQLSTATE 'WL006' THEN
            brief := calls[place];
        END;
        IF filled[place] ? 'result' THEN
            brief := jsonb_set(brief, '{payload,result}', 'null');
        END IF;
        IF filled[place] ? 'error' THEN
            brief := jsonb_set(brief, '{payload,error,message}',
                to_jsonb(left(brief #>> '{payload,error,message}', 200)));
        END IF;
        BEGIN
            PERFORM windlass.enqueue_many(jsonb_build_array(brief));
        EXCEPTION WHEN SQLSTATE 'WL005' OR SQLSTATE 'WL006' THEN
            RAISE WARNING 'what follows the end of task % cannot be enqueued: %', tasks[place], SQLERRM;
        END;
    END LOOP;
END
$$;

-- settle_failures: as settle_batch, for settlements of tasks that are to come back, or call back.
-- A retry is none if it would begin later than `max_age` seconds after the task was enqueued (or, if somebody
-- reopened it, after its first attempt since), or if retries of its type are stopped: then the task is dead.
-- What is read of a task for that never changes while it is claimed. Those tasks are named too (`given_up`).
-- What has begun and comes back without an attempt used does not expire any more.
CREATE FUNCTION windlass.settle_failures(
    tokens uuid[], which smallint[], task_ids uuid[], generations integer[], started_after float8[],
    outcomes text[], results text[], delays float8[], errors text[], reported boolean[],
    retention interval, dead_retention interval, key_retention interval, patience interval,
    max_ages float8[], calls_back boolean
) RETURNS TABLE (ordinal integer, before boolean, given_up boolean)
LANGUAGE plpgsql
SET jit = off
AS $$
#variable_conflict use_column
DECLARE
    asked constant text[] := outcomes;
    missed integer[];
    befores boolean[];
BEGIN
    IF outcomes && '{retried}' AND (max_ages IS NOT NULL OR EXISTS (SELECT FROM windlass.stopped_type)) THEN
        SELECT
            array_agg(CASE WHEN g.why IS NULL THEN u.outcome ELSE 'dead' END ORDER BY u.ordinal),
            array_agg(CASE WHEN g.why IS NULL THEN u.error
                ELSE (u.error::jsonb || jsonb_build_object('given_up', g.why))::text END ORDER BY u.ordinal)
        INTO outcomes, errors
        FROM unnest(task_ids, outcomes, delays, errors, max_ages) WITH ORDINALITY
            AS u (task_id, outcome, delay, error, max_age, ordinal)
        LEFT JOIN LATERAL (
            SELECT CASE
                WHEN s.type IS NOT NULL THEN 'retries of this type are stopped: ' || s.reason
                WHEN windlass.clock() + coalesce(u.delay, 0) * interval '1 second'
                    > windlass.tried_since(t) + u.max_age * interval '1 second'
                    THEN format('its next attempt would begin more than %s s after it was enqueued', u.max_age)
            END AS why
            FROM windlass.task t
            LEFT JOIN windlass.stopped_type s ON s.type = t.type
            WHERE u.outcome = 'retried' AND t.id = u.task_id
                AND NOT EXISTS (SELECT FROM windlass.cancel_request q WHERE q.task_id = u.task_id)
        ) g ON true;
    END IF;

    SELECT coalesce(array_agg(b.ordinal), '{}'), coalesce(array_agg(b.before), '{}') INTO missed, befores
    FROM windlass.settle_batch(
        tokens, which, task_ids, generations, started_after, outcomes, results, delays, errors, reported,
        retention, dead_retention, key_retention, patience
    ) b;

    IF outcomes && '{snoozed,released}' AND EXISTS (SELECT FROM windlass.expiry) THEN
        PERFORM windlass.forget_expiry(ARRAY(
            SELECT u.task_id
            FROM unnest(task_ids, outcomes, started_after) WITH ORDINALITY
                AS u (task_id, outcome, started_after, ordinal)
            WHERE u.outcome IN ('snoozed', 'released') AND u.started_after IS NOT NULL
                AND u.ordinal - 1 <> ALL (missed)
        ));
    END IF;

    IF calls_back THEN
        PERFORM windlass.call_back(array_agg(u.task_id))
        FROM unnest(task_ids, outcomes) WITH ORDINALITY AS u (task_id, outcome, ordinal)
        WHERE coalesce(u.outcome, 'completed') IN ('completed', 'failed', 'dead')
            AND u.ordinal - 1 <> ALL (missed)
        HAVING count(*) > 0;
    END IF;
    RETURN QUERY
    SELECT m.ordinal, m.before, false FROM unnest(missed, befores) AS m (ordinal, before)
    UNION ALL
    SELECT u.ordinal::integer - 1, false, true
    FROM unnest(asked, outcomes) WITH ORDINALITY AS u (asked, outcome, ordinal)
    WHERE u.asked = 'retried' AND u.outcome = 'dead' AND u.ordinal - 1 <> ALL (missed);
END
$$;

-- tried_since: from when on the age of a task counts for its retries.
CREATE FUNCTION windlass.tried_since(task windlass.task) RETURNS timestamptz
LANGUAGE sql STABLE
AS $$
-- Each life of a task has a first attempt: with one more than those that ended it was reopened.
SELECT CASE
    WHEN count(*) <= (task.attempts > 0)::integer THEN task.created_at
    WHEN task.attempts = 0 THEN windlass.clock()
    ELSE (array_agg(coalesce(a.started_at, a.ended_at) ORDER BY a.generation DESC))[1]
END
FROM windlass.attempt a
WHERE a.task_id = task.id AND a.attempt = 1
$$;

-- complete_and_call: as complete_task, and what follows is enqueued in the same transaction.
CREATE FUNCTION windlass.complete_and_call(
    shown_token uuid, shown_task uuid, shown_generation integer, started_after float8, result text,
    retention interval, key_retention interval
) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    PERFORM windlass.complete_task(
        shown_token, shown_task, shown_generation, started_after, result, retention, key_retention);
    PERFORM windlass.call_back(ARRAY[shown_task]);
END
$$;
REVOKE EXECUTE ON FUNCTION windlass.complete_and_call FROM PUBLIC;

-- bury_retries: end tasks of a type that wait for another attempt; returns how many.
CREATE FUNCTION windlass.bury_retries(
    stopped text, max_tasks integer, dead_retention interval, key_retention interval
) RETURNS integer
LANGUAGE plpgsql
SET enable_seqscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
SET jit = off
AS $$
DECLARE
    buried uuid[];
    at timestamptz;
    why text;
BEGIN
    SELECT s.reason INTO why FROM windlass.stopped_type s WHERE s.type = stopped;
    IF NOT FOUND THEN
        RETURN 0;
    END IF;
    SELECT array_agg(f.task_id) INTO buried
    FROM (
        SELECT w.task_id
        FROM windlass.scheduled w
        JOIN windlass.task t ON t.id = w.task_id
        WHERE w.lane IN (
                SELECT l.lane FROM windlass.lane l WHERE l.type = stopped
                UNION SELECT r.lane FROM windlass.resting_lane r WHERE r.type = stopped
            )
            AND t.attempts > 0
        ORDER BY w.task_id
        LIMIT max_tasks
        FOR UPDATE OF w SKIP LOCKED
    ) f;
    IF buried IS NULL THEN
        RETURN 0;
    END IF;
    DELETE FROM windlass.scheduled w WHERE w.task_id = ANY (buried);
    at := windlass.clock();
    WITH gone AS (
        DELETE FROM windlass.task t WHERE t.id = ANY (buried) RETURNING t.*
    ), kept AS (
        INSERT INTO windlass.dead (
            id, type, queue, status, priority, max_attempts, attempts, generation,
            retention_seconds, drop_on, created_at, scheduled_for, completed_at,
            idempotency_key, payload, tags, last_error, errors
        )
        SELECT
            g.id, g.type, g.queue, 'dead', g.priority, g.max_attempts, g.attempts, g.generation,
            g.retention_seconds,
            windlass.drop_day(at, g.retention_seconds, dead_retention, g.idempotency_key, key_retention),
            g.created_at, g.scheduled_for, at, g.idempotency_key, g.payload, g.tags,
            e.errors -> -1 ->> 'message',
            jsonb_set(e.errors, '{-1,given_up}', to_jsonb('retries of this type are stopped: ' || why))
        FROM gone g
        CROSS JOIN LATERAL (SELECT windlass.folded_attempts(g.id) AS errors) e
    ), answered AS (
        DELETE FROM windlass.cancel_request q USING gone g WHERE q.task_id = g.id
    )
    DELETE FROM windlass.attempt a USING gone g WHERE a.task_id = g.id;
    PERFORM windlass.call_back(buried);
    RETURN cardinality(buried);
END
$$;

-- rescue_claims: as before. A lost attempt has a class too and is followed by another only if one that failed would be,
-- what follows a dead task is enqueued, and those that died are named.
DROP FUNCTION windlass.rescue_claims(integer, interval, interval, interval);
CREATE FUNCTION windlass.rescue_claims(
    max_claims integer, dead_retention interval, retention interval, key_retention interval
) RETURNS TABLE (
    claims integer, returned integer, lost_attempts integer, dead integer, cancelled integer, died uuid[]
)
LANGUAGE plpgsql
SET enable_hashjoin = off
SET enable_mergejoin = off
SET enable_seqscan = off
SET enable_bitmapscan = off
SET lock_timeout = '100ms'
SET jit = off
AS $$
#variable_conflict use_column
DECLARE
    expired record;
    sums record;
    blocked integer := 0;
    at timestamptz;
BEGIN
    claims := 0; returned := 0; lost_attempts := 0; dead := 0; cancelled := 0; died := '{}';
    FOR expired IN
        SELECT c.token, c.worker_id, c.claimed_at
        FROM windlass.claim c
        WHERE c.expires_at <= windlass.clock()
        ORDER BY c.expires_at, c.fence
        LIMIT 10 * max_claims  -- those that are held must not hide the others
        FOR UPDATE SKIP LOCKED
    LOOP
        EXIT WHEN claims >= max_claims;
        BEGIN
            at := windlass.clock();
            WITH held AS MATERIALIZED (
                SELECT
                    t.id, t.generation, t.attempts, t.max_attempts, t.recoveries,
                    r.started_at, q.reason, u.ordinal,
                    CASE
                        WHEN q.task_id IS NOT NULL THEN 'cancelled'
                        WHEN r.task_id IS NOT NULL AND t.attempts + 1 >= t.max_attempts THEN 'dead'
                        WHEN g.why IS NOT NULL THEN 'dead'
                        WHEN r.task_id IS NOT NULL THEN 'lost'
                        ELSE 'returned'
                    END AS fate,
                    jsonb_build_object(
                        'type', 'WorkerLost', 'message', 'worker ' || expired.worker_id || ' was lost',
                        'class', 'transient',
                        'attempt', t.attempts + 1, 'generation', t.generation, 'worker_id', expired.worker_id,
                        'started_at', r.started_at, 'ended_at', at
                    ) || CASE WHEN g.why IS NULL THEN '{}' ELSE jsonb_build_object('given_up', g.why) END AS error
                FROM windlass.claim_task b
                CROSS JOIN LATERAL unnest(b.task_ids, b.generations) WITH ORDINALITY
                    AS u (task_id, generation, ordinal)
                JOIN windlass.task t ON t.id = ANY (ARRAY[u.task_id]) AND t.generation = u.generation
                LEFT JOIN windlass.running r ON r.task_id = ANY (ARRAY[u.task_id]) AND r.generation = u.generation
                LEFT JOIN windlass.cancel_request q ON q.task_id = ANY (ARRAY[u.task_id])
                CROSS JOIN LATERAL (
                    SELECT CASE WHEN r.task_id IS NOT NULL AND t.attempts + 1 < t.max_attempts THEN (
                        SELECT CASE
                            WHEN s.type IS NOT NULL THEN 'retries of this type are stopped: ' || s.reason
                            WHEN at > windlass.tried_since(t) + y.max_age * interval '1 second' THEN format(
                                'its next attempt would begin more than %s s after it was enqueued', y.max_age)
                        END
                        FROM (VALUES (t.type)) AS k (type)
                        LEFT JOIN windlass.stopped_type s ON s.type = k.type
                        LEFT JOIN windlass.task_type y ON y.name = k.type
                    ) END AS why
                    OFFSET 0  -- worked out once
                ) g
                WHERE b.token = expired.token
                ORDER BY u.task_id
                FOR UPDATE OF t SKIP LOCKED
            ), gone AS (
                DELETE FROM windlass.task t
                USING held h
                WHERE t.id = ANY (ARRAY[h.id]) AND h.fate IN ('dead', 'cancelled')
                RETURNING t.*, h.fate, h.error, h.reason, h.started_at
            ), buried AS (
                INSERT INTO windlass.dead (
                    id, type, queue, status, priority, max_attempts, attempts, generation,
                    retention_seconds, drop_on, created_at, scheduled_for, claimed_at, started_at,
                    completed_at, worker_id, token, idempotency_key, payload, tags, last_error, errors
                )
                SELECT
                    g.id, g.type, g.queue, 'dead', g.priority, g.max_attempts, g.attempts + 1, g.generation,
                    g.retention_seconds,
                    windlass.drop_day(at, g.retention_seconds, dead_retention, g.idempotency_key, key_retention),
                    g.created_at, g.scheduled_for, expired.claimed_at, g.started_at, at, expired.worker_id,
                    NULL, g.idempotency_key, g.payload, g.tags, g.error ->> 'message',
                    coalesce(windlass.folded_attempts(g.id), '[]') || jsonb_build_array(g.error)
                FROM gone g
                WHERE g.fate = 'dead'
            ), filed AS (
                INSERT INTO windlass.history (
                    id, type, queue, status, priority, max_attempts, attempts, generation,
                    retention_seconds, drop_on, created_at, scheduled_for, claimed_at, started_at,
                    completed_at, worker_id, token, idempotency_key, payload, tags, last_error, errors
                )
                SELECT
                    g.id, g.type, g.queue, 'cancelled', g.priority, g.max_attempts, g.attempts, g.generation,
                    g.retention_seconds,
                    windlass.drop_day(at, g.retention_seconds, retention, g.idempotency_key, key_retention),
                    g.created_at, g.scheduled_for, expired.claimed_at, g.started_at, at, expired.worker_id,
                    NULL, g.idempotency_key, g.payload, g.tags, g.reason, windlass.folded_attempts(g.id)
                FROM gone g
                WHERE g.fate = 'cancelled'
            ), back AS (
                UPDATE windlass.task t
                SET generation = t.generation + 1,
                    attempts = t.attempts + (h.fate = 'lost')::int,
                    recoveries = least(t.recoveries + (h.fate = 'returned')::int, 1000),
                    returned_by = NULL
                FROM held h
                WHERE t.id = ANY (ARRAY[h.id]) AND h.fate IN ('lost', 'returned')
                RETURNING t.id, t.generation, t.attempts, t.queue, t.type, t.priority, t.scheduled_for,
                    (CASE WHEN t.recoveries >= 2 THEN 2 ELSE 1 END)::smallint AS kind,
                    h.fate, h.error, h.started_at, h.ordinal
            ), ready_again AS (
                INSERT INTO windlass.ready (lane, task_id, generation, ready_at)
                SELECT windlass.lane_number(b.queue, b.type, b.priority, b.kind), b.id, b.generation, b.scheduled_for
                FROM back b
                ORDER BY b.ordinal
            ), listed AS (
                INSERT INTO windlass.lane (lane, queue, type, priority, kind)
                SELECT DISTINCT windlass.lane_number(b.queue, b.type, b.priority, b.kind),
                    b.queue, b.type, b.priority, b.kind
                FROM back b
                WHERE NOT EXISTS (
                    SELECT FROM windlass.lane l
                    WHERE l.lane = windlass.lane_number(b.queue, b.type, b.priority, b.kind)
                )
            ), noted AS (
                INSERT INTO windlass.attempt (task_id, generation, attempt, worker_id, started_at, ended_at, error)
                SELECT b.id, b.generation - 1, b.attempts, expired.worker_id, b.started_at, at,
                    b.error - '{attempt,generation,worker_id,started_at,ended_at}'::text[]
                FROM back b
                WHERE b.fate = 'lost'
            ), unfolded AS (
                DELETE FROM windlass.attempt a USING gone g WHERE a.task_id = ANY (ARRAY[g.id])
            ), answered AS (
                DELETE FROM windlass.cancel_request q USING gone g WHERE q.task_id = ANY (ARRAY[g.id])
            ), stopped AS (
                DELETE FROM windlass.running r USING held h WHERE r.task_id = ANY (ARRAY[h.id])
            )
            SELECT
                count(*) FILTER (WHERE h.fate IN ('returned', 'lost')) AS returned,
                count(*) FILTER (WHERE h.fate IN ('lost', 'dead')) AS lost,
                count(*) FILTER (WHERE h.fate = 'dead') AS dead,
                count(*) FILTER (WHERE h.fate = 'cancelled') AS cancelled,
                array_agg(h.id) FILTER (WHERE h.fate = 'dead') AS died
            INTO sums
            FROM held h;

            -- What somebody holds stays with its expired claim until the next sweep.
            IF EXISTS (
                SELECT
                FROM windlass.claim_task b
                CROSS JOIN LATERAL unnest(b.task_ids, b.generations) AS u (task_id, generation)
                JOIN windlass.task t ON t.id = ANY (ARRAY[u.task_id]) AND t.generation = u.generation
                WHERE b.token = expired.token
            ) THEN
                CONTINUE WHEN sums.returned + sums.dead + sums.cancelled = 0;
            ELSE
                DELETE FROM windlass.claim c WHERE c.token = expired.token;
                DELETE FROM windlass.claim_task b WHERE b.token = expired.token;
                DELETE FROM windlass.completed_within w WHERE w.token = expired.token;
            END IF;
            IF sums.dead > 0 THEN
                died := died || sums.died;
                PERFORM windlass.call_back(sums.died);
            END IF;
            claims := claims + 1;
            returned := returned + sums.returned;
            lost_attempts := lost_attempts + sums.lost;
            dead := dead + sums.dead;
            cancelled := cancelled + sums.cancelled;
        EXCEPTION WHEN lock_not_available THEN
            blocked := blocked + 1;
            IF blocked = 10 THEN
                -- More such waits would add up to longer than a chore may take.
                PERFORM set_config('lock_timeout', '1ms', true);
            END IF;
        END;
    END LOOP;
    IF returned > 0 THEN
        PERFORM windlass.wake(false);
    END IF;
    RETURN NEXT;
END
$$;

-- cancel_task: end a waiting task, ask the worker of a claimed one, or say that it has ended.
-- A request is made of the generation that is claimed. NULL: nobody knows the task.
CREATE OR REPLACE FUNCTION windlass.cancel_task(
    cancelled uuid, why text, retention interval, key_retention interval
) RETURNS text
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    at timestamptz;
    claimed integer;
BEGIN
    FOR turn IN 1..100 LOOP
        IF windlass.take_waiting(cancelled) THEN
            at := windlass.clock();
            WITH gone AS (
                DELETE FROM windlass.task t WHERE t.id = cancelled RETURNING t.*
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
                DELETE FROM windlass.cancel_request q USING gone g WHERE q.task_id = g.id
            )
            DELETE FROM windlass.attempt a USING gone g WHERE a.task_id = g.id;
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
