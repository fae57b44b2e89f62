-- What a key costs: most are new, and were looked for three times after they had been taken.

-- enqueue_tasks: add all tasks or none. Arrays run in parallel; an array that no task uses is NULL.
-- Returns the tasks that were there before: their place in the call and the id to answer with.
-- Waits for an uncommitted task with the same idempotency key; keys are taken in sorted order.
-- `numbered`: of a conflict, the message says which task of the call it is.
CREATE OR REPLACE FUNCTION windlass.enqueue_tasks(
    task_ids uuid[], types text[], queues text[], priorities smallint[], payloads text[],
    max_attempts smallint[], delays float8[], due_times timestamptz[], keys text[],
    tag_lists text[], retentions integer[],
    fence_token uuid, fence_task uuid, fence_generation integer,
    repeated boolean, caller_commits boolean, numbered boolean DEFAULT false
) RETURNS TABLE (ordinal integer, task_id uuid)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_hashjoin = off
SET enable_mergejoin = off
SET enable_seqscan = off
SET enable_bitmapscan = off
SET plan_cache_mode = force_generic_plan
SET jit = off
AS $$
#variable_conflict use_column
DECLARE
    born timestamptz;
    known integer[] := '{}';
    known_ids uuid[] := '{}';
    wanted integer := 0;  -- keys of this call
    taken integer := 0;  -- those of them that nobody had
    clash record;
    missing integer;
BEGIN
    IF fence_token IS NOT NULL THEN
        IF current_setting('transaction_isolation') <> 'read committed' THEN
            -- It sees the task as it was when it began. The lock finds out what became of it since, and
            -- fails as any write to what has changed does there.
            PERFORM FROM windlass.task t WHERE t.id = fence_task FOR SHARE;
        END IF;
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
        -- A call in several statements has taken its keys before, for these tasks (reserve_keys).
        SELECT count(*), count(*) FILTER (WHERE EXISTS (
            SELECT
            FROM windlass.idempotency i
            WHERE i.type = u.type AND i.key = u.key AND i.task_id = u.id
        ))
        INTO wanted, taken
        FROM unnest(task_ids, types, keys) WITH ORDINALITY AS u (id, type, key, ordinal)
        WHERE u.key IS NOT NULL AND u.ordinal <> ALL (known);
    END IF;
    IF taken < wanted THEN
        FOR turn IN 1..10 LOOP
            INSERT INTO windlass.idempotency (type, key, task_id, fingerprint)
            SELECT u.type, u.key, u.id, hashtextextended(u.payload::jsonb::text, 0)
            FROM unnest(task_ids, types, payloads, keys) WITH ORDINALITY
                AS u (id, type, payload, key, ordinal)
            WHERE u.key IS NOT NULL AND u.ordinal <> ALL (known)
            ORDER BY u.type COLLATE "C", u.key COLLATE "C", u.ordinal
            ON CONFLICT DO NOTHING;
            GET DIAGNOSTICS taken = ROW_COUNT;
            EXIT WHEN taken = wanted;  -- all of them are new

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
                    (SELECT l.payload::jsonb FROM windlass.large_payload l WHERE l.task_id = i.task_id),
                    (SELECT v.payload::jsonb FROM unnest(task_ids, payloads) AS v (id, payload)
                        WHERE v.id = i.task_id)
                )
            ORDER BY u.ordinal
            LIMIT 1;
            IF FOUND THEN
                RAISE EXCEPTION '%task type ''%'', idempotency key ''%'': task % was enqueued with another payload',
                    CASE WHEN numbered THEN format('item %s: ', clash.ordinal - 1) ELSE '' END,
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
        IF taken < wanted THEN
            SELECT known || coalesce(array_agg(u.ordinal), '{}'),
                known_ids || coalesce(array_agg(i.task_id), '{}')
            INTO known, known_ids
            FROM unnest(task_ids, types, keys) WITH ORDINALITY AS u (id, type, key, ordinal)
            JOIN windlass.idempotency i ON i.type = u.type AND i.key = u.key
            WHERE u.ordinal <> ALL (known) AND i.task_id <> u.id;
        END IF;
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
            a.key, CASE WHEN NOT windlass.is_large(a.payload) THEN a.payload::jsonb END,
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

    IF pg_column_size(payloads) > 2000 THEN  -- or none is large
        INSERT INTO windlass.large_payload (task_id, payload)
        SELECT u.id, u.payload
        FROM unnest(task_ids, payloads) WITH ORDINALITY AS u (id, payload, ordinal)
        WHERE windlass.is_large(u.payload) AND u.ordinal <> ALL (known);
    END IF;
    IF cardinality(array_remove(tag_lists, NULL)) > 0 THEN
        INSERT INTO windlass.task_tag (tag, task_id)
        SELECT e.tag, u.id
        FROM unnest(task_ids, tag_lists) WITH ORDINALITY AS u (id, tags, ordinal)
        CROSS JOIN LATERAL jsonb_array_elements_text(u.tags::jsonb) AS e (tag)
        WHERE u.ordinal <> ALL (known)
        ON CONFLICT DO NOTHING;  -- a tag that is given twice
    END IF;
    -- As in add_lanes and wake, which as functions in SQL would be planned anew by each call.
    INSERT INTO windlass.lane (lane, queue, type, priority, kind)
    SELECT k.lane, k.queue, k.type, k.priority, 0
    FROM (
        SELECT DISTINCT
            windlass.lane_number(u.queue, u.type, u.priority, 0::smallint) AS lane,
            u.queue, u.type, u.priority
        FROM unnest(queues, types, priorities) AS u (queue, type, priority)
    ) k
    WHERE NOT EXISTS (SELECT FROM windlass.lane l WHERE l.lane = k.lane);
    IF caller_commits OR EXISTS (SELECT FROM windlass.worker_pulse p WHERE p.idle) THEN
        PERFORM pg_notify('windlass.wake', CASE
            WHEN cardinality(task_ids) = 1 AND delays IS NULL AND due_times IS NULL
                THEN windlass.lane_number(queues[1], types[1], priorities[1], 0::smallint)::text
            ELSE ''
        END);
    END IF;
    RETURN QUERY SELECT k.ordinal - 1, k.id FROM unnest(known, known_ids) AS k (ordinal, id);
END
$$;
