-- Tasks that are of no use once they are late: not started by then, they are cancelled.

-- Until when a task has to have begun. A row is removed when its task comes back without an attempt used although it
-- has begun, or is reopened; else some time after it has begun or ended, by the leader: so that whatever else is done
-- to a task need not look here. While it is empty nobody pays for it.
CREATE TABLE windlass.expiry (
    task_id uuid PRIMARY KEY,
    expires_at timestamptz NOT NULL
);
CREATE INDEX expiry_time ON windlass.expiry (expires_at);

-- Who may do so with tasks may do so with this.
DO $$
DECLARE
    granted record;
BEGIN
    FOR granted IN
        SELECT a.privilege_type AS privilege,
            CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE a.grantee::regrole::text END AS role
        FROM pg_class c
        CROSS JOIN aclexplode(c.relacl) a
        WHERE c.oid = 'windlass.task'::regclass AND a.grantee <> c.relowner
            AND a.privilege_type IN ('SELECT', 'INSERT', 'DELETE')
    LOOP
        EXECUTE format('GRANT %s ON windlass.expiry TO %s', granted.privilege, granted.role);
    END LOOP;
END
$$;

-- let_expire: note until when tasks have to have begun; one that is known already, or ended, is left as it was.
CREATE FUNCTION windlass.let_expire(task_ids uuid[], expiries timestamptz[]) RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET jit = off
AS $$
INSERT INTO windlass.expiry (task_id, expires_at)
SELECT u.id, u.expires_at
FROM unnest(task_ids, expiries) AS u (id, expires_at)
WHERE u.expires_at IS NOT NULL
    AND EXISTS (SELECT FROM windlass.task t WHERE t.id = u.id AND t.generation = 1)
ON CONFLICT DO NOTHING
$$;

-- enqueue_expiring: as enqueue_tasks, of tasks some of which expire: at a time, or so many seconds from now.
CREATE FUNCTION windlass.enqueue_expiring(
    task_ids uuid[], types text[], queues text[], priorities smallint[], payloads text[],
    max_attempts smallint[], delays float8[], due_times timestamptz[], keys text[],
    tag_lists text[], retentions integer[],
    fence_token uuid, fence_task uuid, fence_generation integer,
    repeated boolean, caller_commits boolean, expiries timestamptz[], expiry_delays float8[]
) RETURNS TABLE (ordinal integer, task_id uuid)
LANGUAGE plpgsql
AS $$
DECLARE
    at timestamptz;
BEGIN
    RETURN QUERY SELECT k.ordinal, k.task_id FROM windlass.enqueue_tasks(
        task_ids, types, queues, priorities, payloads, max_attempts, delays, due_times, keys, tag_lists,
        retentions, fence_token, fence_task, fence_generation, repeated, caller_commits
    ) k;
    at := windlass.clock();
    PERFORM windlass.let_expire(task_ids, ARRAY(
        SELECT coalesce(u.expiry, at + u.delay * interval '1 second')
        FROM unnest(task_ids, expiries, expiry_delays) WITH ORDINALITY AS u (id, expiry, delay, ordinal)
        ORDER BY u.ordinal
    ));
END
$$;

-- checked_expiry: a time, or seconds from now, or an error.
CREATE FUNCTION windlass.checked_expiry(given jsonb) RETURNS timestamptz
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
BEGIN
    IF given IS NULL THEN
        RETURN NULL;
    ELSIF jsonb_typeof(given) = 'number' THEN
        IF given::numeric NOT BETWEEN 0 AND 3162240000 THEN
            PERFORM windlass.refuse('WL006', format(
                'expires %s: use seconds from now, not below 0 and less than a hundred years', windlass.shown(given)));
        END IF;
        RETURN windlass.clock() + given::float8 * interval '1 second';
    ELSIF jsonb_typeof(given) = 'string' AND given #>> '{}' ~ '(Z|[+-][0-9]{2}(:?[0-9]{2})?)$' THEN
        RETURN windlass.checked_time(given);
    END IF;
    PERFORM windlass.refuse('WL006', format(
        'expires %s: use seconds from now, or a time with a time zone', windlass.shown(given)));
END
$$;

-- expired_among: those of some tasks that should have begun by now.
CREATE FUNCTION windlass.expired_among(task_ids uuid[]) RETURNS uuid[]
LANGUAGE sql STABLE
SET enable_seqscan = off
SET jit = off
AS $$
SELECT array_agg(e.task_id) FROM windlass.expiry e WHERE e.task_id = ANY (task_ids) AND e.expires_at <= windlass.clock()
$$;

-- forget_expiry: tasks that do not expire any more.
CREATE FUNCTION windlass.forget_expiry(task_ids uuid[]) RETURNS void
LANGUAGE sql
SET enable_seqscan = off
SET jit = off
AS $$
DELETE FROM windlass.expiry e WHERE e.task_id = ANY (task_ids)
$$;

-- expire_tasks: cancel tasks that wait and should have begun by now. It looks at `max_tasks` of those that expired
-- first, and waits for nobody. Says how many were cancelled, and whether there may be more to do.
CREATE FUNCTION windlass.expire_tasks(max_tasks integer, retention interval, key_retention interval)
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
    at timestamptz;
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
    at := windlass.clock();
    WITH gone AS (
        DELETE FROM windlass.task t WHERE t.id = ANY (taken) RETURNING t.*
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
            g.created_at, g.scheduled_for, at, g.idempotency_key, g.payload, g.tags,
            'expired: it was not started in time', windlass.folded_attempts(g.id)
        FROM gone g
    ), answered AS (
        DELETE FROM windlass.cancel_request q USING gone g WHERE q.task_id = ANY (ARRAY[g.id])
    )
    DELETE FROM windlass.attempt a USING gone g WHERE a.task_id = ANY (ARRAY[g.id]);

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

-- retry_task: reopen an unsuccessful task as a new generation. Of two at once the second finds
-- nothing. Returns false if it does not rest among the unsuccessful.
CREATE OR REPLACE FUNCTION windlass.retry_task(reopened uuid) RETURNS boolean
LANGUAGE plpgsql
SET lock_timeout = '5s'
AS $$
#variable_conflict use_column
DECLARE
    was windlass.dead;
    at timestamptz;
BEGIN
    PERFORM set_config('windlass_internal.removing', 'on', true);
    DELETE FROM windlass.dead d WHERE d.id = reopened RETURNING d.* INTO was;
    IF NOT FOUND THEN
        DELETE FROM windlass.history h WHERE h.id = reopened AND h.status = 'cancelled'
        RETURNING h.* INTO was;
    END IF;
    PERFORM set_config('windlass_internal.removing', 'off', true);
    IF was.id IS NULL THEN
        RETURN false;
    END IF;
    at := windlass.clock();
    -- A request that is not committed yet was made of the generation that has ended: it is waited for.
    INSERT INTO windlass.cancel_request (task_id, reason, requested_at) VALUES (reopened, '', at)
    ON CONFLICT DO NOTHING;
    DELETE FROM windlass.cancel_request q WHERE q.task_id = reopened;
    -- Whoever reopens it late wants it done.
    PERFORM windlass.forget_expiry(ARRAY[reopened]);
    INSERT INTO windlass.task (
        id, type, queue, priority, max_attempts, generation, retention_seconds, created_at,
        scheduled_for, idempotency_key, payload, tags
    )
    VALUES (
        was.id, was.type, was.queue, was.priority, was.max_attempts, was.generation + 1,
        was.retention_seconds, was.created_at, at, was.idempotency_key, was.payload, was.tags
    );
    INSERT INTO windlass.attempt (task_id, generation, attempt, worker_id, started_at, ended_at, error)
    SELECT was.id, (e ->> 'generation')::integer, (e ->> 'attempt')::smallint,
        (e ->> 'worker_id')::uuid, (e ->> 'started_at')::timestamptz, (e ->> 'ended_at')::timestamptz,
        e - '{attempt,generation,worker_id,started_at,ended_at}'::text[]
    FROM jsonb_array_elements(coalesce(was.errors, '[]')) AS j (e);
    INSERT INTO windlass.ready (lane, task_id, generation, ready_at)
    VALUES (windlass.lane_number(was.queue, was.type, was.priority, 0::smallint), was.id, was.generation + 1, at);
    PERFORM windlass.add_lanes(
        ARRAY[was.queue], ARRAY[was.type], ARRAY[was.priority]::smallint[], ARRAY[0]::smallint[]);
    PERFORM windlass.wake(false);
    RETURN true;
END
$$;

-- enqueue_many: as before, with the option `expires`.
CREATE OR REPLACE FUNCTION windlass.enqueue_many(tasks jsonb, fence jsonb DEFAULT NULL) RETURNS SETOF uuid
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
AS $$
#variable_conflict use_variable
DECLARE
    known_options constant text[] :=
        '{id,type,payload,queue,priority,delay,at,expires,idempotency_key,max_attempts,tags,retention}';
    not_built constant text[] := '{ordering_key,on_dead}';
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
    expiries timestamptz[] := '{}';
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
            expiries := expiries || windlass.checked_expiry(item -> 'expires');
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
    IF array_remove(expiries, NULL) <> '{}' THEN
        PERFORM windlass.let_expire(ids, expiries);
    END IF;
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

-- enqueue: as before, with the option `expires`. Whoever could call it still can.
ALTER FUNCTION windlass.enqueue(text, jsonb, text, integer, float8, timestamptz, text, integer, text[])
    RENAME TO enqueue_before;
DROP FUNCTION windlass.enqueue_checked(text, jsonb, text, integer, float8, timestamptz, text, integer, text[]);
CREATE FUNCTION windlass.enqueue_checked(
    type text, payload jsonb, queue text, priority integer, delay float8, at timestamptz,
    idempotency_key text, max_attempts integer, tags text[], expires timestamptz
) RETURNS uuid
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
SET extra_float_digits = 1  -- the delay goes through a text
SET TimeZone = 'UTC'  -- and so do the times
AS $$
SELECT windlass.enqueue_many(jsonb_build_array(jsonb_build_object(
    'type', type, 'payload', payload, 'queue', queue, 'priority', priority, 'delay', delay,
    -- What is past means now, also before our era, which a text says in another way.
    'at', CASE WHEN at < '0001-01-02 00:00:00+00' THEN '0001-01-02 00:00:00+00' ELSE at END,
    'expires', CASE WHEN expires < '0001-01-02 00:00:00+00' THEN '0001-01-02 00:00:00+00' ELSE expires END,
    'idempotency_key', idempotency_key,
    'max_attempts', max_attempts, 'tags', tags
)))
$$;

CREATE FUNCTION windlass.enqueue(
    type text, payload jsonb DEFAULT '{}', queue text DEFAULT NULL, priority integer DEFAULT NULL,
    delay float8 DEFAULT NULL, at timestamptz DEFAULT NULL, idempotency_key text DEFAULT NULL,
    max_attempts integer DEFAULT NULL, tags text[] DEFAULT NULL, expires timestamptz DEFAULT NULL
) RETURNS uuid
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET plan_cache_mode = force_generic_plan
SET jit = off
AS $$
#variable_conflict use_variable
DECLARE
    control constant text := E'[\\u0001-\\u001f\\u007f-\\u009f]';
    known record;
    added uuid;
    born timestamptz;
    number bigint;
    is_listed boolean;
BEGIN
    IF delay IS NULL AND at IS NULL AND idempotency_key IS NULL AND tags IS NULL AND expires IS NULL
        AND length(type) BETWEEN 1 AND 200 AND type !~ control
        AND coalesce(length(queue) BETWEEN 1 AND 200 AND queue !~ control, true)
        AND coalesce(priority BETWEEN 0 AND 100, true)
        AND coalesce(max_attempts BETWEEN 1 AND 30000, true)
        AND jsonb_typeof(payload) = 'object'
        AND pg_column_size(payload) < 1000  -- the text of a longer one could be of gigabytes
    THEN
        SELECT s.max_payload_bytes, t.queue, t.priority, t.max_attempts, t.retention_seconds INTO known
        FROM windlass.setting s
        LEFT JOIN windlass.task_type t ON t.name = type
        WHERE s.only_row;
        -- What is in a payload of less than 300 bytes is neither too deep nor too long.
        IF octet_length(payload::text) <= least(299, known.max_payload_bytes) THEN
            queue := coalesce(queue, known.queue, 'default');
            priority := coalesce(priority, known.priority, 10);
            max_attempts := coalesce(max_attempts, known.max_attempts, 4);
            added := windlass.new_task_id();
            number := windlass.lane_number(queue, type, priority::smallint, 0::smallint);
            born := windlass.clock();
            -- One statement: to begin one takes as long as to add a task.
            WITH task AS (
                INSERT INTO windlass.task (
                    id, type, queue, priority, max_attempts, retention_seconds, created_at, scheduled_for, payload
                )
                VALUES (
                    added, type, queue, priority, max_attempts, known.retention_seconds, born, born, payload
                )
            ), waiting AS (
                INSERT INTO windlass.ready (lane, task_id, generation, ready_at)
                VALUES (number, added, 1, born)
            )
            SELECT EXISTS (SELECT FROM windlass.lane l WHERE l.lane = number) INTO is_listed;
            IF NOT is_listed THEN
                PERFORM windlass.add_lanes(
                    ARRAY[queue], ARRAY[type], ARRAY[priority]::smallint[], ARRAY[0::smallint]);
            END IF;
            -- Whoever is idle by the time of the commit: the caller may commit much later.
            PERFORM pg_notify('windlass.wake', number || ' ' || added);
            RETURN added;
        END IF;
    END IF;
    RETURN windlass.enqueue_checked(
        type, payload, queue, priority, delay, at, idempotency_key, max_attempts, tags, expires);
END
$$;
REVOKE EXECUTE ON FUNCTION windlass.enqueue FROM PUBLIC;
DO $$
DECLARE
    granted record;
BEGIN
    FOR granted IN
        SELECT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE a.grantee::regrole::text END AS role, a.is_grantable
        FROM pg_proc p
        CROSS JOIN aclexplode(p.proacl) a
        WHERE p.pronamespace = (SELECT c.relnamespace FROM pg_class c WHERE c.oid = 'windlass.task'::regclass)
            AND p.proname = 'enqueue_before' AND a.grantee <> p.proowner
    LOOP
        EXECUTE format('GRANT EXECUTE ON FUNCTION windlass.enqueue TO %s%s', granted.role,
            CASE WHEN granted.is_grantable THEN ' WITH GRANT OPTION' ELSE '' END);
    END LOOP;
END
$$;
DROP FUNCTION windlass.enqueue_before;
