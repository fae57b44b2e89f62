-- A handler may end its task in a transaction of its own: its effects and its success are one commit.

-- Tasks that were ended so, until the worker's settlement has counted their claim down: a handler's
-- transaction may last, and must not keep the claim from its heartbeats until then.
CREATE TABLE windlass.completed_within (
    token uuid NOT NULL,
    task_id uuid NOT NULL,
    PRIMARY KEY (token, task_id)
);

-- check_completion: refuse a handler that has lost its lease; locks nothing. Returns whether there is a
-- partition for its task to rest in.
CREATE FUNCTION windlass.check_completion(
    shown_token uuid, shown_task uuid, shown_generation integer, retention interval, key_retention interval
) RETURNS boolean
LANGUAGE plpgsql
AS $$
DECLARE
    day date;
BEGIN
    SELECT windlass.drop_day(windlass.clock(), t.retention_seconds, retention, t.idempotency_key, key_retention)
    INTO day
    FROM windlass.task t
    WHERE t.id = shown_task AND t.generation = shown_generation
        AND EXISTS (SELECT FROM windlass.claim c WHERE c.token = shown_token);
    IF NOT FOUND THEN
        RAISE EXCEPTION 'task %: the lease is lost', shown_task USING ERRCODE = 'WL001';
    END IF;
    RETURN EXISTS (
        SELECT
        FROM pg_inherits i
        JOIN pg_class c ON c.oid = i.inhrelid
        WHERE i.inhparent = 'windlass.history'::regclass AND NOT i.inhdetachpending
            AND day >= to_date(split_part(c.relname, '_', 2), 'YYYYMMDD')
            AND day < to_date(split_part(c.relname, '_', 3), 'YYYYMMDD')
    );
END
$$;

-- complete_task: end a task as completed in a transaction of its handler. The claim is held FOR KEY
-- SHARE until that ends: heartbeats go on, and a rescue leaves the claim alone.
CREATE FUNCTION windlass.complete_task(
    shown_token uuid, shown_task uuid, shown_generation integer, started_after float8, result text,
    retention interval, key_retention interval
) RETURNS void
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    held record;
    at timestamptz;
BEGIN
    SELECT c.worker_id, c.claimed_at INTO held
    FROM windlass.claim c WHERE c.token = shown_token
    FOR KEY SHARE;
    IF FOUND THEN
        PERFORM FROM windlass.task t WHERE t.id = shown_task AND t.generation = shown_generation FOR UPDATE;
    END IF;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'task %: the lease is lost', shown_task USING ERRCODE = 'WL001';
    END IF;
    at := windlass.clock();
    WITH ended AS (
        DELETE FROM windlass.task t WHERE t.id = shown_task RETURNING t.*
    ), kept AS (
        INSERT INTO windlass.history (
            id, type, queue, status, priority, max_attempts, attempts, generation,
            retention_seconds, drop_on, created_at, scheduled_for, claimed_at, started_at,
            completed_at, worker_id, token, idempotency_key, payload, tags, result, errors
        )
        SELECT
            e.id, e.type, e.queue, 'completed', e.priority, e.max_attempts, e.attempts + 1, e.generation,
            e.retention_seconds,
            windlass.drop_day(at, e.retention_seconds, retention, e.idempotency_key, key_retention),
            e.created_at, e.scheduled_for, held.claimed_at,
            held.claimed_at + started_after * interval '1 second', at, held.worker_id, shown_token,
            e.idempotency_key, e.payload, e.tags, result::jsonb, windlass.folded_attempts(e.id)
        FROM ended e
    ), unfolded AS (
        DELETE FROM windlass.attempt a USING ended e WHERE a.task_id = e.id
    ), answered AS (
        DELETE FROM windlass.cancel_request q USING ended e WHERE q.task_id = e.id
    ), stopped AS (
        DELETE FROM windlass.running r USING ended e WHERE r.task_id = e.id
    )
    INSERT INTO windlass.completed_within (token, task_id)
    SELECT shown_token, e.id FROM ended e;
END
$$;
REVOKE EXECUTE ON FUNCTION windlass.complete_task FROM PUBLIC;

-- enqueue_tasks: add all tasks or none. Arrays run in parallel; an array that no task uses is NULL.
-- Returns the tasks that were there before: their place in the call and the id to answer with.
-- Waits for an uncommitted task with the same idempotency key; keys are taken in sorted order.
CREATE OR REPLACE FUNCTION windlass.enqueue_tasks(
    task_ids uuid[], types text[], queues text[], priorities smallint[], payloads text[],
    max_attempts smallint[], delays float8[], due_times timestamptz[], keys text[],
    tag_lists text[], retentions integer[],
    fence_token uuid, fence_task uuid, fence_generation integer,
    repeated boolean, caller_commits boolean
) RETURNS TABLE (ordinal integer, task_id uuid)
LANGUAGE plpgsql
AS $$
#variable_conflict use_column
DECLARE
    born timestamptz;
    known integer[] := '{}';
    known_ids uuid[] := '{}';
    clash record;
    missing integer;
BEGIN
    IF fence_token IS NOT NULL THEN
        PERFORM FROM windlass.claim c WHERE c.token = fence_token FOR KEY SHARE;
        IF NOT FOUND OR NOT EXISTS (
            SELECT FROM windlass.task t WHERE t.id = fence_task AND t.generation = fence_generation
        ) THEN
            -- Its own handler may have ended it in a transaction, perhaps in this one, and goes on.
            IF NOT EXISTS (
                SELECT FROM windlass.completed_within w WHERE w.token = fence_token AND w.task_id = fence_task
            ) THEN
                RAISE EXCEPTION 'task %: the lease is lost', fence_task USING ERRCODE = 'WL001';
            END IF;
        END IF;
    END IF;

    IF repeated THEN
        SELECT array_agg(u.ordinal), array_agg(u.id) INTO known, known_ids
        FROM unnest(task_ids) WITH ORDINALITY AS u (id, ordinal)
        WHERE EXISTS (SELECT FROM windlass.task t WHERE t.id = u.id)
            OR EXISTS (SELECT FROM windlass.history h WHERE h.id = u.id)
            OR EXISTS (SELECT FROM windlass.dead d WHERE d.id = u.id);
        known := coalesce(known, '{}');
        known_ids := coalesce(known_ids, '{}');
    END IF;

    IF keys IS NOT NULL THEN
        FOR turn IN 1..10 LOOP
            INSERT INTO windlass.idempotency (type, key, task_id, fingerprint)
            SELECT u.type, u.key, u.id, hashtextextended(u.payload::jsonb::text, 0)
            FROM unnest(task_ids, types, payloads, keys) WITH ORDINALITY
                AS u (id, type, payload, key, ordinal)
            WHERE u.key IS NOT NULL AND u.ordinal <> ALL (known)
            ORDER BY u.type COLLATE "C", u.key COLLATE "C", u.ordinal
            ON CONFLICT DO NOTHING;

            -- Equal text is equal; other text may still be: 1.0 is 1, so look at the task itself.
            SELECT u.ordinal, u.type, u.key, i.task_id INTO clash
            FROM unnest(types, payloads, keys) WITH ORDINALITY AS u (type, payload, key, ordinal)
            JOIN windlass.idempotency i ON i.type = u.type AND i.key = u.key
            WHERE u.ordinal <> ALL (known)
                AND i.fingerprint <> hashtextextended(u.payload::jsonb::text, 0)
                AND u.payload::jsonb IS DISTINCT FROM coalesce(
                    (SELECT t.payload FROM windlass.task t WHERE t.id = i.task_id),
                    (SELECT h.payload FROM windlass.history h WHERE h.id = i.task_id),
                    (SELECT d.payload FROM windlass.dead d WHERE d.id = i.task_id),
                    (SELECT v.payload::jsonb FROM unnest(task_ids, payloads) AS v (id, payload)
                        WHERE v.id = i.task_id)
                )
            ORDER BY u.ordinal
            LIMIT 1;
            IF FOUND THEN
                RAISE EXCEPTION 'task type ''%'', idempotency key ''%'': task % was enqueued with another payload',
                    clash.type, clash.key, clash.task_id
                    USING ERRCODE = 'WL002', DETAIL = clash.ordinal - 1,
                    HINT = 'use another key for another payload';
            END IF;

            -- A key that retention removed between the two statements is tried again.
            SELECT count(*) INTO missing
            FROM unnest(types, keys) WITH ORDINALITY AS u (type, key, ordinal)
            WHERE u.key IS NOT NULL AND u.ordinal <> ALL (known)
                AND NOT EXISTS (
                    SELECT FROM windlass.idempotency i WHERE i.type = u.type AND i.key = u.key
                );
            EXIT WHEN missing = 0;
        END LOOP;
        SELECT known || coalesce(array_agg(u.ordinal), '{}'),
            known_ids || coalesce(array_agg(i.task_id), '{}')
        INTO known, known_ids
        FROM unnest(task_ids, types, keys) WITH ORDINALITY AS u (id, type, key, ordinal)
        JOIN windlass.idempotency i ON i.type = u.type AND i.key = u.key
        WHERE u.ordinal <> ALL (known) AND i.task_id <> u.id;
    END IF;

    born := windlass.clock();
    WITH asked AS MATERIALIZED (
        SELECT
            u.*, windlass.lane_number(u.queue, u.type, u.priority, 0::smallint) AS lane,
            greatest(born, coalesce(u.due_time, born + u.delay * interval '1 second', born)) AS due
        FROM unnest(
            task_ids, types, queues, priorities, payloads, max_attempts, delays, due_times, keys,
            tag_lists, retentions
        ) WITH ORDINALITY AS u (
            id, type, queue, priority, payload, max_attempts, delay, due_time, key,
            tags, retention, ordinal
        )
        WHERE u.ordinal <> ALL (known)
    ), tasks AS (
        INSERT INTO windlass.task (
            id, type, queue, priority, max_attempts, retention_seconds, created_at, scheduled_for,
            idempotency_key, payload, tags
        )
        SELECT
            a.id, a.type, a.queue, a.priority, a.max_attempts, a.retention, born, a.due,
            a.key, a.payload::jsonb,
            CASE WHEN a.tags IS NOT NULL
                THEN ARRAY(SELECT jsonb_array_elements_text(a.tags::jsonb)) END
        FROM asked a
    ), later AS (
        INSERT INTO windlass.scheduled (task_id, lane, generation, due)
        SELECT a.id, a.lane, 1, a.due
        FROM asked a
        WHERE a.due > born
    )
    INSERT INTO windlass.ready (lane, task_id, generation, ready_at)
    SELECT a.lane, a.id, 1, a.due
    FROM asked a
    WHERE a.due <= born
    ORDER BY a.ordinal;

    PERFORM windlass.add_lanes(queues, types, priorities, array_fill(0::smallint, ARRAY[cardinality(types)]));
    PERFORM windlass.wake(caller_commits);
    RETURN QUERY SELECT k.ordinal - 1, k.id FROM unnest(known, known_ids) AS k (ordinal, id);
END
$$;

-- settle_tasks: apply what became of tasks whose claim and generation still hold.
-- Returns, of those not applied, the place in the call and whether they had been applied before.
-- Holds claims FOR KEY SHARE while it may wait for tasks, so heartbeats go on and a rescue
-- keeps away; counts `remaining` down last. `outcomes` are those of Outcome in Python.
CREATE OR REPLACE FUNCTION windlass.settle_tasks(
    tokens uuid[], task_ids uuid[], generations integer[], outcomes text[],
    started_after float8[], results text[], delays float8[], errors text[], reported boolean[],
    retention interval, dead_retention interval, key_retention interval, patience interval
) RETURNS TABLE (ordinal integer, before boolean)
LANGUAGE plpgsql
SET enable_hashjoin = off
SET enable_mergejoin = off
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
DECLARE
    held uuid[];
    workers uuid[];
    claim_times timestamptz[];
    settled bigint[] := '{}';
    ended_here bigint[];
    batch bigint[];
    at timestamptz;
BEGIN
    PERFORM set_config('lock_timeout', (extract(epoch FROM patience) * 1000)::bigint::text, true);
    SELECT array_agg(k.token), array_agg(k.worker_id), array_agg(k.claimed_at)
    INTO held, workers, claim_times
    FROM (
        SELECT c.token, c.worker_id, c.claimed_at
        FROM windlass.claim c
        WHERE c.token = ANY (tokens)
        ORDER BY c.token
        FOR KEY SHARE
    ) k;

    IF held IS NOT NULL THEN
        IF outcomes && '{retried,snoozed,released}' AND EXISTS (SELECT FROM windlass.cancel_request) THEN
            -- What would come back although its cancellation was asked for ends instead.
            SELECT
                array_agg(CASE WHEN q.task_id IS NULL THEN u.outcome ELSE 'cancelled' END ORDER BY u.ordinal),
                array_agg(CASE WHEN q.task_id IS NULL THEN u.error
                    ELSE jsonb_build_object('type', 'Cancelled', 'message', q.reason)::text END
                    ORDER BY u.ordinal)
            INTO outcomes, errors
            FROM unnest(task_ids, outcomes, errors) WITH ORDINALITY AS u (task_id, outcome, error, ordinal)
            LEFT JOIN windlass.cancel_request q
                ON q.task_id = ANY (ARRAY[u.task_id]) AND u.outcome IN ('retried', 'snoozed', 'released');
        END IF;
        at := windlass.clock();

        IF outcomes && '{completed,cancelled}' THEN
            WITH settlement AS MATERIALIZED (
                SELECT
                    u.task_id, u.generation, u.outcome, u.result, u.error, u.reported, u.ordinal,
                    h.token, h.worker_id, h.claimed_at,
                    h.claimed_at + u.after * interval '1 second' AS started_at
                FROM unnest(tokens, task_ids, generations, outcomes, started_after, results, errors, reported)
                    WITH ORDINALITY
                    AS u (token, task_id, generation, outcome, after, result, error, reported, ordinal)
                JOIN unnest(held, workers, claim_times) AS h (token, worker_id, claimed_at)
                    ON h.token = u.token
                WHERE u.outcome IN ('completed', 'cancelled')
            ), ended AS (
                DELETE FROM windlass.task t
                USING settlement s
                WHERE t.id = ANY (ARRAY[s.task_id]) AND t.generation = s.generation
                RETURNING
                    t.id, t.type, t.queue, t.priority, t.max_attempts, t.attempts, t.generation,
                    t.retention_seconds, t.created_at, t.scheduled_for, t.idempotency_key, t.payload, t.tags,
                    s.outcome, s.result, s.error, s.reported, s.ordinal, s.token, s.worker_id,
                    s.claimed_at, s.started_at
            ), kept AS (
                INSERT INTO windlass.history (
                    id, type, queue, status, priority, max_attempts, attempts, generation,
                    retention_seconds, drop_on, created_at, scheduled_for, claimed_at, started_at,
                    completed_at, worker_id, token, idempotency_key, payload, tags, result,
                    last_error, errors
                )
                SELECT
                    e.id, e.type, e.queue, e.outcome::windlass.task_status, e.priority, e.max_attempts,
                    e.attempts + (e.outcome = 'completed')::int, e.generation, e.retention_seconds,
                    windlass.drop_day(at, e.retention_seconds, retention, e.idempotency_key, key_retention),
                    e.created_at, e.scheduled_for, e.claimed_at, e.started_at, at, e.worker_id,
                    e.token, e.idempotency_key, e.payload, e.tags, e.result::jsonb,
                    CASE WHEN e.error IS NOT NULL THEN e.error::jsonb ->> 'message' END,
                    CASE WHEN e.generation > 1 THEN windlass.folded_attempts(e.id) END
                FROM ended e
            ), unfolded AS (
                DELETE FROM windlass.attempt a USING ended e
                WHERE e.generation > 1 AND a.task_id = ANY (ARRAY[e.id])
            ), stopped AS (
                DELETE FROM windlass.running r USING ended e
                WHERE e.reported AND r.task_id = ANY (ARRAY[e.id])
            )
            SELECT coalesce(array_agg(e.ordinal), '{}') INTO batch FROM ended e;
            settled := settled || batch;
        END IF;

        IF outcomes && '{failed,dead}' THEN
            WITH settlement AS MATERIALIZED (
                SELECT
                    u.task_id, u.generation, u.outcome, u.error, u.reported, u.ordinal,
                    h.token, h.worker_id, h.claimed_at,
                    h.claimed_at + u.after * interval '1 second' AS started_at
                FROM unnest(tokens, task_ids, generations, outcomes, started_after, errors, reported)
                    WITH ORDINALITY AS u (token, task_id, generation, outcome, after, error, reported, ordinal)
                JOIN unnest(held, workers, claim_times) AS h (token, worker_id, claimed_at)
                    ON h.token = u.token
                WHERE u.outcome IN ('failed', 'dead')
            ), ended AS (
                DELETE FROM windlass.task t
                USING settlement s
                WHERE t.id = ANY (ARRAY[s.task_id]) AND t.generation = s.generation
                RETURNING
                    t.id, t.type, t.queue, t.priority, t.max_attempts, t.attempts, t.generation,
                    t.retention_seconds, t.created_at, t.scheduled_for, t.idempotency_key, t.payload, t.tags,
                    s.outcome, s.error, s.reported, s.ordinal, s.token, s.worker_id,
                    s.claimed_at, s.started_at
            ), kept AS (
                INSERT INTO windlass.dead (
                    id, type, queue, status, priority, max_attempts, attempts, generation,
                    retention_seconds, drop_on, created_at, scheduled_for, claimed_at, started_at,
                    completed_at, worker_id, token, idempotency_key, payload, tags,
                    last_error, errors
                )
                SELECT
                    e.id, e.type, e.queue, e.outcome::windlass.task_status, e.priority, e.max_attempts,
                    e.attempts + 1, e.generation, e.retention_seconds,
                    windlass.drop_day(at, e.retention_seconds, dead_retention, e.idempotency_key, key_retention),
                    e.created_at, e.scheduled_for, e.claimed_at, e.started_at, at, e.worker_id,
                    e.token, e.idempotency_key, e.payload, e.tags,
                    e.error::jsonb ->> 'message',
                    coalesce(windlass.folded_attempts(e.id), '[]') || jsonb_build_array(
                        e.error::jsonb || jsonb_build_object(
                            'attempt', e.attempts + 1, 'generation', e.generation,
                            'worker_id', e.worker_id, 'started_at', e.started_at, 'ended_at', at
                        )
                    )
                FROM ended e
            ), unfolded AS (
                DELETE FROM windlass.attempt a USING ended e WHERE a.task_id = ANY (ARRAY[e.id])
            ), stopped AS (
                DELETE FROM windlass.running r USING ended e
                WHERE e.reported AND r.task_id = ANY (ARRAY[e.id])
            )
            SELECT coalesce(array_agg(e.ordinal), '{}') INTO batch FROM ended e;
            settled := settled || batch;
        END IF;

        IF EXISTS (SELECT FROM windlass.cancel_request) THEN
            DELETE FROM windlass.cancel_request q
            USING unnest(settled) AS s (ordinal)
            WHERE q.task_id = ANY (ARRAY[task_ids[s.ordinal]]);
        END IF;

        IF outcomes && '{retried,snoozed,released}' THEN
            WITH settlement AS MATERIALIZED (
                SELECT
                    u.task_id, u.generation, u.outcome, u.error, u.reported, u.ordinal,
                    h.token, h.worker_id,
                    h.claimed_at + u.after * interval '1 second' AS started_at,
                    at + coalesce(u.delay, 0) * interval '1 second' AS due
                FROM unnest(tokens, task_ids, generations, outcomes, started_after, delays, errors, reported)
                    WITH ORDINALITY
                    AS u (token, task_id, generation, outcome, after, delay, error, reported, ordinal)
                JOIN unnest(held, workers, claim_times) AS h (token, worker_id, claimed_at)
                    ON h.token = u.token
                WHERE u.outcome IN ('retried', 'snoozed', 'released')
            ), returned AS (
                UPDATE windlass.task t
                SET generation = t.generation + 1,
                    attempts = t.attempts + (s.outcome = 'retried')::int,
                    recoveries = CASE WHEN s.outcome = 'retried' THEN 0 ELSE t.recoveries END,
                    scheduled_for = CASE WHEN s.outcome = 'released' THEN t.scheduled_for ELSE s.due END,
                    returned_by = s.token
                FROM settlement s
                WHERE t.id = ANY (ARRAY[s.task_id]) AND t.generation = s.generation
                RETURNING
                    t.id, t.generation, t.attempts, t.queue, t.type, t.priority, t.scheduled_for,
                    (CASE WHEN t.recoveries >= 2 THEN 2 WHEN s.outcome = 'released' THEN 1 ELSE 0 END)::smallint
                        AS kind,
                    s.outcome, s.error, s.reported, s.ordinal, s.token, s.worker_id, s.started_at
            ), later AS (
                INSERT INTO windlass.scheduled (task_id, lane, generation, due)
                SELECT r.id, windlass.lane_number(r.queue, r.type, r.priority, r.kind), r.generation, r.scheduled_for
                FROM returned r
                WHERE r.scheduled_for > at
            ), now AS (
                INSERT INTO windlass.ready (lane, task_id, generation, ready_at)
                SELECT windlass.lane_number(r.queue, r.type, r.priority, r.kind), r.id, r.generation, r.scheduled_for
                FROM returned r
                WHERE r.scheduled_for <= at
                ORDER BY r.ordinal
            ), listed AS (
                INSERT INTO windlass.lane (lane, queue, type, priority, kind)
                SELECT DISTINCT
                    windlass.lane_number(r.queue, r.type, r.priority, r.kind),
                    r.queue, r.type, r.priority, r.kind
                FROM returned r
                WHERE NOT EXISTS (
                    SELECT FROM windlass.lane l
                    WHERE l.lane = windlass.lane_number(r.queue, r.type, r.priority, r.kind)
                )
            ), noted AS (
                INSERT INTO windlass.attempt (task_id, generation, attempt, worker_id, started_at, ended_at, error)
                SELECT r.id, r.generation - 1, r.attempts, r.worker_id, r.started_at, at, r.error::jsonb
                FROM returned r
                WHERE r.outcome = 'retried'
            ), stopped AS (
                DELETE FROM windlass.running u USING returned r
                WHERE r.reported AND u.task_id = ANY (ARRAY[r.id])
            )
            SELECT coalesce(array_agg(r.ordinal), '{}') INTO batch FROM returned r;
            settled := settled || batch;
            PERFORM windlass.wake(false);
        END IF;

        ended_here := settled;
        IF cardinality(settled) < cardinality(task_ids) THEN
            -- What a handler completed in its own transaction was left to be counted down here.
            WITH completed AS (
                DELETE FROM windlass.completed_within w
                USING unnest(tokens, task_ids) WITH ORDINALITY AS u (token, task_id, ordinal)
                WHERE w.token = u.token AND w.task_id = u.task_id AND u.ordinal <> ALL (settled)
                RETURNING u.ordinal
            )
            SELECT ended_here || coalesce(array_agg(c.ordinal), '{}') INTO ended_here FROM completed c;
        END IF;
        PERFORM FROM windlass.claim c WHERE c.token = ANY (held) ORDER BY c.token FOR NO KEY UPDATE;
        WITH counted AS MATERIALIZED (
            SELECT tokens[s.ordinal] AS token, count(*)::integer AS tasks
            FROM unnest(ended_here) AS s (ordinal)
            GROUP BY tokens[s.ordinal]
        )
        UPDATE windlass.claim c
        SET remaining = greatest(c.remaining - k.tasks, 0)
        FROM counted k
        WHERE c.token = k.token;
        -- An emptied claim that another settlement still holds is left to that one, or to a rescue.
        WITH emptied AS MATERIALIZED (
            SELECT c.token
            FROM windlass.claim c
            WHERE c.token = ANY (held) AND c.remaining = 0
            ORDER BY c.token
            FOR UPDATE SKIP LOCKED
        ), gone AS (
            DELETE FROM windlass.claim c USING emptied e WHERE c.token = e.token
        )
        DELETE FROM windlass.claim_task b USING emptied e WHERE b.token = e.token;
    END IF;

    IF cardinality(settled) < cardinality(task_ids) THEN
        RETURN QUERY
        SELECT u.ordinal::integer - 1,
            EXISTS (SELECT FROM windlass.history h WHERE h.id = u.task_id AND h.token = u.token)
            OR EXISTS (SELECT FROM windlass.dead d WHERE d.id = u.task_id AND d.token = u.token)
            OR EXISTS (SELECT FROM windlass.task t WHERE t.id = u.task_id AND t.returned_by = u.token
                AND t.generation = u.generation + 1)
        FROM unnest(tokens, task_ids, generations) WITH ORDINALITY AS u (token, task_id, generation, ordinal)
        WHERE u.ordinal <> ALL (settled);
    END IF;
END
$$;

-- rescue_claims: give back the tasks of claims that expired. A claim that somebody holds is left
-- for the next sweep, and so is one of which they hold another row. The lock re-checks the expiry;
-- what else is decided is read after it.
CREATE OR REPLACE FUNCTION windlass.rescue_claims(
    max_claims integer, dead_retention interval, retention interval, key_retention interval
) RETURNS TABLE (claims integer, returned integer, lost_attempts integer, dead integer, cancelled integer)
LANGUAGE plpgsql
SET enable_hashjoin = off
SET enable_mergejoin = off
SET enable_seqscan = off
SET enable_bitmapscan = off
SET lock_timeout = '100ms'
AS $$
#variable_conflict use_column
DECLARE
    expired record;
    sums record;
    blocked integer := 0;
    at timestamptz;
BEGIN
    claims := 0; returned := 0; lost_attempts := 0; dead := 0; cancelled := 0;
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
                        WHEN r.task_id IS NOT NULL THEN 'lost'
                        ELSE 'returned'
                    END AS fate,
                    jsonb_build_object(
                        'type', 'WorkerLost', 'message', 'worker ' || expired.worker_id || ' was lost',
                        'attempt', t.attempts + 1, 'generation', t.generation, 'worker_id', expired.worker_id,
                        'started_at', r.started_at, 'ended_at', at
                    ) AS error
                FROM windlass.claim_task b
                CROSS JOIN LATERAL unnest(b.task_ids, b.generations) WITH ORDINALITY
                    AS u (task_id, generation, ordinal)
                JOIN windlass.task t ON t.id = ANY (ARRAY[u.task_id]) AND t.generation = u.generation
                LEFT JOIN windlass.running r ON r.task_id = ANY (ARRAY[u.task_id]) AND r.generation = u.generation
                LEFT JOIN windlass.cancel_request q ON q.task_id = ANY (ARRAY[u.task_id])
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
                    jsonb_build_object('type', b.error ->> 'type', 'message', b.error ->> 'message')
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
                count(*) FILTER (WHERE h.fate = 'cancelled') AS cancelled
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
