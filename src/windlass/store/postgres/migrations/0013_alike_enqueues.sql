-- What enqueues cost: most of their tasks differ in their payload alone.

-- enqueue_alike: add tasks that are due now and have no key and no tag. They become ready in their order.
CREATE FUNCTION windlass.enqueue_alike(
    task_ids uuid[], payloads text[],
    type text, queue text, priority smallint, max_attempts smallint, retention integer
) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    born constant timestamptz := windlass.clock();
    number constant bigint := windlass.lane_number(queue, type, priority, 0::smallint);
    own constant xid8 := pg_current_xact_id();  -- as a default, of each row, it took a tenth of the time
    is_listed boolean;
    is_awaited boolean;
BEGIN
    -- One statement: to begin one takes as long as to add a task. Several arrays in a FROM would first be
    -- written to a table, and a CTE that both need as well.
    WITH tasks AS (
        INSERT INTO windlass.task (
            id, type, queue, priority, max_attempts, retention_seconds, created_at, scheduled_for, payload
        )
        SELECT
            u.id, type, queue, priority, max_attempts, retention, born, born,
            CASE WHEN NOT windlass.is_large(u.payload) THEN u.payload::jsonb END
        FROM (SELECT unnest(task_ids) AS id, unnest(payloads) AS payload) u
    ), waiting AS (
        INSERT INTO windlass.ready (lane, x, task_id, generation, ready_at)
        SELECT number, own, u.id, 1, born
        FROM (SELECT unnest(task_ids) AS id) u
    )
    SELECT
        EXISTS (SELECT FROM windlass.lane l WHERE l.lane = number),
        EXISTS (SELECT FROM windlass.worker_pulse p WHERE p.idle)
    INTO is_listed, is_awaited;
    IF pg_column_size(payloads) > 2000 THEN  -- or none is large
        INSERT INTO windlass.large_payload (task_id, payload)
        SELECT u.id, u.payload
        FROM (SELECT unnest(task_ids) AS id, unnest(payloads) AS payload) u
        WHERE windlass.is_large(u.payload);
    END IF;
    IF NOT is_listed THEN
        PERFORM windlass.add_lanes(ARRAY[queue], ARRAY[type], ARRAY[priority], ARRAY[0::smallint]);
    END IF;
    IF is_awaited THEN
        PERFORM pg_notify('windlass.wake', number::text);  -- where to look
    END IF;
END
$$;

-- enqueue_one: the same of a single task. Not to make arrays of it saves a sixth.
CREATE FUNCTION windlass.enqueue_one(
    task_id uuid, payload text,
    type text, queue text, priority smallint, max_attempts smallint, retention integer
) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_variable
DECLARE
    born constant timestamptz := windlass.clock();
    number constant bigint := windlass.lane_number(queue, type, priority, 0::smallint);
    is_listed boolean;
    is_awaited boolean;
BEGIN
    WITH task AS (
        INSERT INTO windlass.task (
            id, type, queue, priority, max_attempts, retention_seconds, created_at, scheduled_for, payload
        )
        VALUES (
            task_id, type, queue, priority, max_attempts, retention, born, born,
            CASE WHEN NOT windlass.is_large(payload) THEN payload::jsonb END
        )
    ), waiting AS (
        INSERT INTO windlass.ready (lane, task_id, generation, ready_at)
        VALUES (number, task_id, 1, born)
    )
    SELECT
        EXISTS (SELECT FROM windlass.lane l WHERE l.lane = number),
        EXISTS (SELECT FROM windlass.worker_pulse p WHERE p.idle)
    INTO is_listed, is_awaited;
    IF windlass.is_large(payload) THEN
        INSERT INTO windlass.large_payload (task_id, payload) VALUES (task_id, payload);
    END IF;
    IF NOT is_listed THEN
        PERFORM windlass.add_lanes(ARRAY[queue], ARRAY[type], ARRAY[priority], ARRAY[0::smallint]);
    END IF;
    IF is_awaited THEN
        PERFORM pg_notify('windlass.wake', number::text);
    END IF;
END
$$;

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

-- plain_kind: what all these tasks have alike, if they differ in id and payload alone and nothing can be
-- wrong with any of them; else NULL, and they have to be looked at one by one.
CREATE FUNCTION windlass.plain_kind(tasks jsonb, max_bytes integer) RETURNS jsonb
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    own constant text[] := '{id,payload}';
    alike constant text[] := '{type,queue,priority,max_attempts}';
    control constant text := E'[\\u0001-\\u001f\\u007f-\\u009f]';
    kind jsonb;
BEGIN
    IF jsonb_array_length(tasks) = 0 OR jsonb_typeof(tasks -> 0) <> 'object' THEN
        RETURN NULL;
    END IF;
    kind := (tasks -> 0) - own;
    IF NOT kind ?& alike OR kind - alike <> '{}' OR NOT coalesce(
        jsonb_typeof(kind -> 'type') = 'string' AND length(kind ->> 'type') BETWEEN 1 AND 200
            AND kind ->> 'type' !~ control
        AND jsonb_typeof(kind -> 'queue') = 'string' AND length(kind ->> 'queue') BETWEEN 1 AND 200
            AND kind ->> 'queue' !~ control
        AND jsonb_typeof(kind -> 'priority') = 'number' AND windlass.is_whole(kind -> 'priority', 0, 100)
        AND jsonb_typeof(kind -> 'max_attempts') = 'number'
            AND windlass.is_whole(kind -> 'max_attempts', 1, 30000),
        false
    ) THEN
        RETURN NULL;
    END IF;
    -- What is in a payload of less than 300 bytes is neither too deep nor too long.
    IF EXISTS (
        SELECT FROM jsonb_array_elements(tasks) AS e (item)
        WHERE CASE WHEN jsonb_typeof(e.item) = 'object' THEN
            (e.item - own)::text IS DISTINCT FROM kind::text  -- as jsonb 10.0 equals 10, which is not refused
            OR jsonb_typeof(e.item -> 'payload') IS DISTINCT FROM 'object'
            OR pg_column_size(e.item -> 'payload') > 1000  -- its text may have gigabytes
            OR octet_length((e.item -> 'payload')::text) > least(299, max_bytes)
            OR jsonb_typeof(e.item -> 'id') IS DISTINCT FROM 'string'
            OR e.item ->> 'id' !~* '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$'
        ELSE true END
    ) THEN
        RETURN NULL;
    END IF;
    RETURN kind;
END
$$;

-- enqueue_many: add all tasks of an array or none; returns their ids in its order. A task is an
-- object of the parameters of enqueue; it may bring a new id, and the seconds that it is kept for.
-- fence is what the enqueue of a handler shows: token, task_id, generation.
CREATE OR REPLACE FUNCTION windlass.enqueue_many(tasks jsonb, fence jsonb DEFAULT NULL) RETURNS SETOF uuid
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_variable
DECLARE
    known_options constant text[] :=
        '{id,type,payload,queue,priority,delay,at,idempotency_key,max_attempts,tags,retention}';
    not_built constant text[] := '{expires,ordering_key,on_dead}';
    settings windlass.setting;
    item jsonb;
    place integer;
    unknown text;
    name text;
    known windlass.task_type;
    payload jsonb;
    given uuid[] := '{}';
    ids uuid[] := '{}';
    types text[] := '{}';
    queues text[] := '{}';
    priorities smallint[] := '{}';
    payloads text[] := '{}';
    attempts smallint[] := '{}';
    delays float8[] := '{}';
    times timestamptz[] := '{}';
    keys text[] := '{}';
    tag_lists text[] := '{}';
    retentions integer[] := '{}';
    numbered boolean;
    kind jsonb;
BEGIN
    IF jsonb_typeof(tasks) IS DISTINCT FROM 'array' THEN
        PERFORM windlass.refuse('WL005', format(
            'enqueue_many was given a value of type %s; use an array of objects, each with a type',
            coalesce(jsonb_typeof(tasks), 'null')));
    END IF;
    PERFORM windlass.check_fence(fence);
    SELECT * INTO settings FROM windlass.setting;
    kind := windlass.plain_kind(tasks, settings.max_payload_bytes);
    IF kind IS NOT NULL THEN
        SELECT array_agg((e.item ->> 'id')::uuid ORDER BY e.ordinal),
            array_agg((e.item -> 'payload')::text ORDER BY e.ordinal)
        INTO given, payloads
        FROM jsonb_array_elements(tasks) WITH ORDINALITY AS e (item, ordinal);
        SELECT * INTO known FROM windlass.task_type t WHERE t.name = kind ->> 'type';
        ids := given;
        types := array_fill(kind ->> 'type', ARRAY[cardinality(ids)]);
        queues := array_fill(kind ->> 'queue', ARRAY[cardinality(ids)]);
        priorities := array_fill((kind -> 'priority')::smallint, ARRAY[cardinality(ids)]);
        attempts := array_fill((kind -> 'max_attempts')::smallint, ARRAY[cardinality(ids)]);
        retentions := array_fill(known.retention_seconds, ARRAY[cardinality(ids)]);
    END IF;
    FOR item, place IN SELECT e.item, e.ordinal - 1
        FROM jsonb_array_elements(CASE WHEN kind IS NULL THEN tasks ELSE '[]' END)
            WITH ORDINALITY AS e (item, ordinal)
    LOOP
        IF jsonb_typeof(item) <> 'object' THEN
            PERFORM windlass.refuse('WL005', format(
                'item %s is of type %s; use an object with a type', place, jsonb_typeof(item)));
        END IF;
        BEGIN
            item := (SELECT coalesce(jsonb_object_agg(o.key, o.value), '{}') FROM jsonb_each(item) AS o
                WHERE o.value <> 'null');
            SELECT o.key INTO unknown FROM jsonb_object_keys(item) AS o (key)
            WHERE o.key <> ALL (known_options || not_built) LIMIT 1;
            IF FOUND THEN
                PERFORM windlass.refuse('WL006', format('option %s is not known; options are: %s',
                    windlass.shown(to_jsonb(unknown)), array_to_string(known_options, ', ')));
            END IF;
            name := windlass.checked_name('task name', item -> 'type');
            SELECT * INTO known FROM windlass.task_type t WHERE t.name = name;
            payload := coalesce(item -> 'payload', '{}');
            PERFORM windlass.check_payload(name, payload, settings.max_payload_bytes);
            IF item ?| not_built THEN
                SELECT o.key INTO unknown FROM unnest(not_built) WITH ORDINALITY AS o (key, ordinal)
                WHERE item ? o.key ORDER BY o.ordinal LIMIT 1;
                PERFORM windlass.refuse('WL006', format('option ''%s'' is not built yet', unknown));
            END IF;
            IF item ? 'delay' AND item ? 'at' THEN
                PERFORM windlass.refuse('WL006',
                    'options ''delay'' and ''at'' exclude each other; give one');
            END IF;
            IF NOT windlass.is_whole(item -> 'max_attempts', 1, 30000) THEN
                PERFORM windlass.refuse('WL006', format('max_attempts %s: use an integer from 1 to 30000',
                    windlass.shown(item -> 'max_attempts')));
            END IF;
            IF NOT windlass.is_whole(item -> 'retention', 0, 2144448000) THEN
                PERFORM windlass.refuse('WL006', format('retention %s: use whole seconds, at most 68 years',
                    windlass.shown(item -> 'retention')));
            END IF;
            IF item ? 'tags' AND jsonb_typeof(item -> 'tags') <> 'array' THEN
                PERFORM windlass.refuse('WL006', format('tags %s: give a list of strings',
                    windlass.shown(item -> 'tags')));
            END IF;
            PERFORM windlass.checked_name('tag', e.tag) FROM jsonb_array_elements(item -> 'tags') AS e (tag);
            given := given || windlass.checked_id(item -> 'id');
            ids := ids || coalesce(given[place + 1], windlass.new_task_id());
            types := types || name;
            queues := queues || CASE WHEN item ? 'queue' THEN windlass.checked_name('queue', item -> 'queue')
                ELSE coalesce(known.queue, 'default') END;
            priorities := priorities || CASE WHEN item ? 'priority'
                THEN windlass.checked_priority(item -> 'priority')
                ELSE coalesce(known.priority, 10::smallint) END;
            payloads := payloads || payload::text;
            attempts := attempts || coalesce((item -> 'max_attempts')::smallint, known.max_attempts, 4::smallint);
            delays := delays || windlass.checked_delay(item -> 'delay');
            times := times || windlass.checked_time(item -> 'at');
            keys := keys || CASE WHEN item ? 'idempotency_key'
                THEN windlass.checked_name('idempotency_key', item -> 'idempotency_key') END;
            tag_lists := tag_lists || CASE WHEN item -> 'tags' <> '[]' THEN (item -> 'tags')::text END;
            retentions := retentions || coalesce((item -> 'retention')::integer, known.retention_seconds);
        EXCEPTION WHEN SQLSTATE 'WL005' OR SQLSTATE 'WL006' THEN
            PERFORM windlass.refuse(SQLSTATE,
                CASE WHEN jsonb_array_length(tasks) > 1 THEN format('item %s: %s', place, SQLERRM)
                    ELSE SQLERRM END);
        END;
    END LOOP;
    IF cardinality(ids) = 0 THEN
        RETURN;
    END IF;
    -- The client for Python brings an id for each task, and counts them by itself.
    numbered := cardinality(ids) > 1 AND array_position(given, NULL) IS NOT NULL;
    IF current_setting('transaction_isolation') = 'serializable' THEN
        -- What is read here conflicts with whoever else enqueues: ids made within the last minute, as a
        -- client makes them, are not looked for.
        given := ARRAY(
            SELECT CASE WHEN substr(u.id::text, 15, 1) <> '7' OR abs(
                    ('x' || left(replace(u.id::text, '-', ''), 12))::bit(48)::bigint
                    - extract(epoch FROM clock_timestamp()) * 1000
                ) > 60000 THEN u.id END
            FROM unnest(given) WITH ORDINALITY AS u (id, ordinal)
            ORDER BY u.ordinal
        );
    END IF;
    IF array_remove(given, NULL) <> '{}' THEN
        SELECT min(k.place) INTO place
        FROM (
            SELECT u.id, u.ordinal - 1 AS place, row_number() OVER (PARTITION BY u.id ORDER BY u.ordinal) AS time
            FROM unnest(given) WITH ORDINALITY AS u (id, ordinal)
            WHERE u.id IS NOT NULL
        ) k
        WHERE k.time > 1 OR EXISTS (SELECT FROM windlass.task t WHERE t.id = ANY (ARRAY[k.id]));
        PERFORM windlass.refuse_id(given, place);
    END IF;
    RETURN QUERY
    SELECT coalesce(k.task_id, u.id)
    FROM unnest(ids) WITH ORDINALITY AS u (id, ordinal)
    LEFT JOIN windlass.enqueue_tasks(
        ids, types, queues, priorities, payloads, attempts, delays, times,
        CASE WHEN array_remove(keys, NULL) <> '{}' THEN keys END,
        tag_lists, retentions,
        (fence ->> 'token')::uuid, (fence ->> 'task_id')::uuid, (fence ->> 'generation')::integer,
        false, true, numbered
    ) AS k ON k.ordinal = u.ordinal - 1
    ORDER BY u.ordinal;
    IF array_remove(given, NULL) <> '{}' THEN
        -- From here on no other task can take these ids, so what had one and ended can be seen.
        BEGIN
            SELECT min(u.ordinal) - 1 INTO place
            FROM unnest(given) WITH ORDINALITY AS u (id, ordinal)
            WHERE EXISTS (SELECT FROM windlass.history h WHERE h.id = ANY (ARRAY[u.id]))
                OR EXISTS (SELECT FROM windlass.dead d WHERE d.id = ANY (ARRAY[u.id]));
            -- Gives back the locks of the partitions: the caller's transaction may keep retention from them.
            RAISE EXCEPTION USING ERRCODE = 'WL000';
        EXCEPTION WHEN SQLSTATE 'WL000' THEN
            PERFORM windlass.refuse_id(given, place);
        END;
    END IF;
END
$$;

-- A scan that is unwelcome and cannot be avoided seems so dear to servers before 18 that they compile the plan,
-- ten times as long as it takes. Our own sessions never compile; those of a pooler and of callers may.
ALTER FUNCTION windlass.promote_due SET jit = off;
ALTER FUNCTION windlass.relist_busy_lanes SET jit = off;
ALTER FUNCTION windlass.rescue_claims SET jit = off;
ALTER FUNCTION windlass.retire_lanes SET jit = off;
ALTER FUNCTION windlass.settle_tasks SET jit = off;
ALTER FUNCTION windlass.start_tasks SET jit = off;
