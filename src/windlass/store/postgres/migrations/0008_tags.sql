-- What listings need: tags in a table of their own.

-- Which tasks have a tag, live and ended; written by an enqueue with tags, and by nothing else of a
-- task's life. A row whose task is gone is harmless.
CREATE TABLE windlass.task_tag (
    tag text NOT NULL,
    task_id uuid NOT NULL,
    PRIMARY KEY (tag, task_id)
);

-- Nobody adds or ends a task from here on: the tags of live ones are copied, and all of them. What has
-- ended before is final, and comes in a later migration, for which nobody has to wait.
LOCK TABLE windlass.task IN SHARE MODE;
INSERT INTO windlass.task_tag (tag, task_id)
SELECT DISTINCT unnest(t.tags), t.id FROM windlass.task t WHERE t.tags IS NOT NULL;

-- add_history_partition: make the place for tasks that may go from `first` until before `past`.
-- ATTACH takes a lighter lock than PARTITION OF: readers and settlements go on.
CREATE OR REPLACE FUNCTION windlass.add_history_partition(first date, past date) RETURNS boolean
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET lock_timeout = '2s'  -- for this alone: the transaction may be that of a caller of cancel
AS $$
DECLARE
    name constant text := format('history_%s_%s', to_char(first, 'YYYYMMDD'), to_char(past, 'YYYYMMDD'));
    home constant text := (
        SELECT n.nspname FROM pg_namespace n JOIN pg_class c ON c.relnamespace = n.oid
        WHERE c.oid = 'windlass.history'::regclass
    );
BEGIN
    PERFORM pg_advisory_xact_lock('windlass.history'::regclass::oid::integer, 1);
    IF to_regclass(format('%I.%I', home, name)) IS NOT NULL THEN
        RETURN false;
    END IF;
    EXECUTE format('CREATE TABLE %I.%I (LIKE windlass.history INCLUDING CONSTRAINTS)', home, name);
    EXECUTE format('CREATE UNIQUE INDEX ON %I.%I (id)', home, name);
    EXECUTE format('CREATE INDEX ON %I.%I (id) WHERE status = ''cancelled''', home, name);
    EXECUTE format('ALTER TABLE windlass.history ATTACH PARTITION %I.%I FOR VALUES FROM (%L) TO (%L)',
        home, name, first, past);
    RETURN true;
END
$$;

-- drop_history_partition: forget the keys and tags of a detached partition's tasks, and drop it.
CREATE OR REPLACE FUNCTION windlass.drop_history_partition(name text) RETURNS void
LANGUAGE plpgsql
AS $$
DECLARE
    home constant text := (
        SELECT n.nspname FROM pg_namespace n JOIN pg_class c ON c.relnamespace = n.oid
        WHERE c.oid = 'windlass.history'::regclass
    );
BEGIN
    PERFORM set_config('lock_timeout', '100ms', true);
    EXECUTE format('LOCK TABLE %I.%I IN ACCESS EXCLUSIVE MODE', home, name);
    EXECUTE format(
        'DELETE FROM windlass.idempotency i USING %I.%I h '
        'WHERE i.type = h.type AND i.key = h.idempotency_key AND i.task_id = h.id', home, name);
    EXECUTE format(
        'DELETE FROM windlass.task_tag k USING (SELECT h.id, unnest(h.tags) AS tag FROM %I.%I h) g '
        'WHERE k.tag = g.tag AND k.task_id = g.id', home, name);
    EXECUTE format('DROP TABLE %I.%I', home, name);
END
$$;

DROP FUNCTION windlass.enqueue_tasks(
    uuid[], text[], text[], smallint[], text[], smallint[], float8[], timestamptz[], text[], text[], integer[],
    uuid, uuid, integer, boolean, boolean
);

-- enqueue_tasks: add all tasks or none. Arrays run in parallel; an array that no task uses is NULL.
-- Returns the tasks that were there before: their place in the call and the id to answer with.
-- Waits for an uncommitted task with the same idempotency key; keys are taken in sorted order.
-- `numbered`: of a conflict, the message says which task of the call it is.
CREATE FUNCTION windlass.enqueue_tasks(
    task_ids uuid[], types text[], queues text[], priorities smallint[], payloads text[],
    max_attempts smallint[], delays float8[], due_times timestamptz[], keys text[],
    tag_lists text[], retentions integer[],
    fence_token uuid, fence_task uuid, fence_generation integer,
    repeated boolean, caller_commits boolean, numbered boolean DEFAULT false
) RETURNS TABLE (ordinal integer, task_id uuid)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
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

    IF cardinality(array_remove(tag_lists, NULL)) > 0 THEN
        INSERT INTO windlass.task_tag (tag, task_id)
        SELECT e.tag, u.id
        FROM unnest(task_ids, tag_lists) WITH ORDINALITY AS u (id, tags, ordinal)
        CROSS JOIN LATERAL jsonb_array_elements_text(u.tags::jsonb) AS e (tag)
        WHERE u.ordinal <> ALL (known)
        ON CONFLICT DO NOTHING;  -- a tag that is given twice
    END IF;
    PERFORM windlass.add_lanes(queues, types, priorities, array_fill(0::smallint, ARRAY[cardinality(types)]));
    PERFORM windlass.wake(caller_commits);
    RETURN QUERY SELECT k.ordinal - 1, k.id FROM unnest(known, known_ids) AS k (ordinal, id);
END
$$;
