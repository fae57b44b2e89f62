-- The schema as the migrations leave it, for people to read. Not run by anything.
-- Renewed by: RENEW_SCHEMA=1 pytest tests/architecture/test_schema.py

CREATE SCHEMA windlass;

CREATE TYPE windlass.task_status AS ENUM (
    'scheduled',
    'blocked',
    'pending',
    'claimed',
    'running',
    'completed',
    'failed',
    'dead',
    'cancelled'
);

CREATE FUNCTION windlass.add_history_partition(first date, past date) RETURNS boolean
    LANGUAGE plpgsql
    AS $$
DECLARE
    name constant text := format('history_%s_%s', to_char(first, 'YYYYMMDD'), to_char(past, 'YYYYMMDD'));
    home constant text := (
        SELECT n.nspname FROM pg_namespace n JOIN pg_class c ON c.relnamespace = n.oid
        WHERE c.oid = 'windlass.history'::regclass
    );
BEGIN
    PERFORM set_config('lock_timeout', '2s', true);
    PERFORM pg_advisory_xact_lock('windlass.history'::regclass::oid::integer, 1);
    IF to_regclass(format('%I.%I', home, name)) IS NOT NULL THEN
        RETURN false;
    END IF;
    EXECUTE format('CREATE TABLE %I.%I (LIKE windlass.history INCLUDING CONSTRAINTS)', home, name);
    EXECUTE format('CREATE UNIQUE INDEX ON %I.%I (id)', home, name);
    EXECUTE format('ALTER TABLE windlass.history ATTACH PARTITION %I.%I FOR VALUES FROM (%L) TO (%L)',
        home, name, first, past);
    RETURN true;
END
$$;

CREATE FUNCTION windlass.add_lanes(queues text[], types text[], priorities smallint[], kinds smallint[]) RETURNS void
    LANGUAGE sql
    AS $$
INSERT INTO windlass.lane (lane, queue, type, priority, kind)
SELECT k.lane, k.queue, k.type, k.priority, k.kind
FROM (
    SELECT DISTINCT
        windlass.lane_number(u.queue, u.type, u.priority, u.kind) AS lane,
        u.queue, u.type, u.priority, u.kind
    FROM unnest(queues, types, priorities, kinds) AS u (queue, type, priority, kind)
) k
WHERE NOT EXISTS (SELECT FROM windlass.lane l WHERE l.lane = k.lane)
$$;

CREATE FUNCTION windlass.assert_leader(claimant uuid, claimed_term bigint) RETURNS void
    LANGUAGE plpgsql
    AS $$
BEGIN
    PERFORM FROM windlass.leadership l
    WHERE l.holder = claimant AND l.term = claimed_term AND l.expires_at > windlass.clock()
    FOR SHARE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'term % is over', claimed_term USING ERRCODE = 'WL004';
    END IF;
END
$$;

CREATE FUNCTION windlass.cancel_task(cancelled uuid, why text, retention interval, key_retention interval) RETURNS text
    LANGUAGE plpgsql
    AS $$
DECLARE
    at timestamptz;
BEGIN
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
    IF EXISTS (SELECT FROM windlass.task t WHERE t.id = cancelled) THEN
        INSERT INTO windlass.cancel_request (task_id, reason, requested_at)
        VALUES (cancelled, why, windlass.clock())
        ON CONFLICT DO NOTHING;
        RETURN 'requested';
    END IF;
    IF EXISTS (SELECT FROM windlass.history h WHERE h.id = cancelled)
        OR EXISTS (SELECT FROM windlass.dead d WHERE d.id = cancelled) THEN
        RETURN 'ended';
    END IF;
    RETURN NULL;
END
$$;

CREATE FUNCTION windlass.change_task(changed uuid, new_priority smallint, new_queue text, new_due timestamp with time zone, new_delay double precision) RETURNS boolean
    LANGUAGE plpgsql
    AS $$
DECLARE
    was record;
    at timestamptz;
    lane bigint;
    wanted_kind smallint;
BEGIN
    IF NOT windlass.take_waiting(changed) THEN
        RETURN false;
    END IF;
    at := windlass.clock();
    UPDATE windlass.task t
    SET priority = coalesce(new_priority, t.priority),
        queue = coalesce(new_queue, t.queue),
        scheduled_for = CASE
            WHEN new_due IS NOT NULL THEN greatest(new_due, at)
            WHEN new_delay IS NOT NULL THEN at + new_delay * interval '1 second'
            ELSE t.scheduled_for
        END
    WHERE t.id = changed
    RETURNING t.* INTO was;
    wanted_kind := CASE WHEN was.recoveries >= 2 THEN 2 ELSE 0 END;
    lane := windlass.lane_number(was.queue, was.type, was.priority, wanted_kind);
    IF was.scheduled_for > at THEN
        INSERT INTO windlass.scheduled (task_id, lane, generation, due)
        VALUES (changed, lane, was.generation, was.scheduled_for);
    ELSE
        INSERT INTO windlass.ready (lane, task_id, generation, ready_at)
        VALUES (lane, changed, was.generation, was.scheduled_for);
    END IF;
    PERFORM windlass.add_lanes(
        ARRAY[was.queue], ARRAY[was.type], ARRAY[was.priority]::smallint[], ARRAY[wanted_kind]);
    PERFORM windlass.wake(false);
    RETURN true;
END
$$;

CREATE FUNCTION windlass.claim_tasks(worker uuid, new_token uuid, types text[], queues text[], wanted integer, lease interval, ageing interval, alone boolean, lanes bigint[], from_x bigint[], from_n bigint[], late_x bigint[]) RETURNS TABLE(id uuid, type text, queue text, priority smallint, payload jsonb, attempts smallint, max_attempts smallint, generation integer, cancel_reason text, fence bigint, snapshot text, read_lanes bigint[], last_x bigint[], last_n bigint[], read_to_end boolean[], alone_waiting boolean, due_in double precision)
    LANGUAGE plpgsql
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    AS $$
#variable_conflict use_column
DECLARE
    -- Taken before any lane is read: what it calls finished is visible to every read below.
    seen constant pg_snapshot := pg_current_snapshot();
    late constant xid8[] := ARRAY(SELECT u.x::text::xid8 FROM unnest(late_x) AS u (x) ORDER BY u.x);
    passed xid8;
    after_x xid8;
    after_n bigint;
    until_x xid8;
    head record;
    batch record;
    end_x bigint;
    end_n bigint;
    ended boolean;
    taken integer := 0;
    ids uuid[] := '{}';
    generations integer[] := '{}';
    all_lanes bigint[] := '{}';
    all_x bigint[] := '{}';
    all_n bigint[] := '{}';
    all_ends boolean[] := '{}';
    granted bigint;
    suspects boolean := false;
    at timestamptz;
BEGIN
    FOR head IN
        SELECT
            l.lane, l.kind, l.priority,
            coalesce(b.x, 0)::text::xid8 AS x, coalesce(b.n, -1) AS n,
            least(h.ready_at, o.ready_at) AS ready_at
        FROM (
            SELECT DISTINCT k.type, k.queue, k.priority, k.kind, k.lane
            FROM windlass.lane k
            WHERE k.type = ANY (types) AND (queues IS NULL OR k.queue = ANY (queues))
                AND NOT EXISTS (
                    SELECT FROM windlass.queue q
                    WHERE q.name = k.queue AND q.paused_at IS NOT NULL
                )
        ) l
        LEFT JOIN unnest(lanes, from_x, from_n) AS b (lane, x, n) ON b.lane = l.lane
        LEFT JOIN LATERAL (
            SELECT r.ready_at
            FROM windlass.ready r
            WHERE r.lane = l.lane AND (r.x, r.n) > (coalesce(b.x, 0)::text::xid8, coalesce(b.n, -1))
            ORDER BY r.x, r.n
            LIMIT 1
        ) h ON true
        LEFT JOIN LATERAL (
            SELECT f.ready_at
            FROM unnest(late) AS e (x)
            CROSS JOIN LATERAL (
                SELECT r.ready_at
                FROM windlass.ready r
                WHERE r.lane = l.lane AND r.x = e.x
                ORDER BY r.n
                LIMIT 1
            ) f
            ORDER BY e.x
            LIMIT 1
        ) o ON true
        ORDER BY
            least(h.ready_at, o.ready_at) - l.priority * ageing,
            l.priority DESC, l.queue COLLATE "C", l.type COLLATE "C", l.kind DESC
    LOOP
        IF (head.kind = 2) <> alone THEN
            suspects := suspects OR (head.kind = 2 AND head.ready_at IS NOT NULL);
            CONTINUE;
        END IF;
        IF alone AND taken = 0 AND head.ready_at IS NOT NULL THEN
            -- Many suspects at once are an outage and no poison: no need for each to run by itself.
            IF (SELECT count(*) FROM (SELECT FROM windlass.ready r WHERE r.lane IN (
                    SELECT k.lane FROM windlass.lane k WHERE k.kind = 2) LIMIT 101) s) > 100 THEN
                wanted := coalesce((
                    SELECT greatest(1, wanted >> least(t.recoveries - 1, 20))
                    FROM windlass.ready r
                    JOIN windlass.task t ON t.id = r.task_id
                    WHERE r.lane = head.lane
                    ORDER BY r.x, r.n
                    LIMIT 1
                ), 1);
            ELSE
                wanted := 1;
            END IF;
        END IF;
        IF taken >= wanted THEN
            EXIT WHEN NOT alone AND suspects;
            CONTINUE;
        END IF;
        IF head.ready_at IS NULL THEN
            all_lanes := all_lanes || head.lane;
            all_x := all_x || NULL::bigint;
            all_n := all_n || NULL::bigint;
            all_ends := all_ends || true;
            CONTINUE;
        END IF;

        end_x := NULL; end_n := NULL; ended := false;
        -- First what lies behind, by its transaction; then what lies ahead.
        FOREACH passed IN ARRAY late || NULL::xid8 LOOP
            CONTINUE WHEN passed >= head.x;
            EXIT WHEN taken >= wanted;
            after_x := coalesce(passed, head.x);
            after_n := CASE WHEN passed IS NULL THEN head.n ELSE -1 END;
            until_x := coalesce(passed, '18446744073709551615');
            WITH found AS MATERIALIZED (
                SELECT r.ctid AS place, r.task_id, r.generation, r.x, r.n
                FROM windlass.ready r
                WHERE r.lane = head.lane AND (r.x, r.n) > (after_x, after_n) AND r.x <= until_x
                ORDER BY r.x, r.n
                LIMIT wanted - taken
                FOR UPDATE SKIP LOCKED
            ), gone AS (
                DELETE FROM windlass.ready r
                USING found f
                WHERE r.ctid = f.place
                RETURNING f.task_id, f.generation, f.x, f.n
            )
            -- One order for all of them, so that it is sorted once.
            SELECT
                coalesce(array_agg(g.task_id ORDER BY g.x, g.n), '{}') AS ids,
                coalesce(array_agg(g.generation ORDER BY g.x, g.n), '{}') AS generations,
                array_agg(g.x ORDER BY g.x, g.n) AS xs,
                array_agg(g.n ORDER BY g.x, g.n) AS ns
            INTO batch
            FROM gone g;

            IF passed IS NULL THEN
                end_x := batch.xs[cardinality(batch.xs)]::text::bigint;
                end_n := batch.ns[cardinality(batch.ns)];
                ended := cardinality(batch.ids) < wanted - taken;
            END IF;
            ids := ids || batch.ids;
            generations := generations || batch.generations;
            taken := cardinality(ids);
        END LOOP;
        all_lanes := all_lanes || head.lane;
        all_x := all_x || end_x;
        all_n := all_n || end_n;
        all_ends := all_ends || ended;
    END LOOP;

    IF taken > 0 THEN
        at := windlass.clock();
        INSERT INTO windlass.claim (token, worker_id, claimed_at, expires_at, remaining)
        VALUES (new_token, worker, at, at + lease, taken)
        RETURNING windlass.claim.fence INTO granted;
        INSERT INTO windlass.claim_task (token, task_ids, generations)
        VALUES (new_token, ids, generations);
    END IF;

    RETURN QUERY SELECT
        NULL::uuid, NULL::text, NULL::text, NULL::smallint, NULL::jsonb, NULL::smallint,
        NULL::smallint, NULL::integer, NULL::text,
        granted, seen::text, all_lanes, all_x, all_n, all_ends, suspects,
        -- What is later than two seconds is the leader's: from the beginning of the index every
        -- promoted task that an old snapshot keeps would be walked over.
        (
            SELECT extract(epoch FROM min(s.due) - windlass.clock())
            FROM windlass.scheduled s
            WHERE s.due > (SELECT windlass.clock() - interval '2 seconds')
        )::float8;
    IF taken > 0 THEN
        RETURN QUERY SELECT
            t.id, t.type, t.queue, t.priority, t.payload, t.attempts,
            t.max_attempts, t.generation, q.reason,
            NULL::bigint, NULL::text, NULL::bigint[], NULL::bigint[], NULL::bigint[],
            NULL::boolean[], NULL::boolean, NULL::float8
        FROM unnest(ids) WITH ORDINALITY AS u (id, ordinal)
        JOIN windlass.task t ON t.id = ANY (ARRAY[u.id])
        LEFT JOIN windlass.cancel_request q ON q.task_id = ANY (ARRAY[u.id])
        ORDER BY u.ordinal;
    END IF;
END
$$;

CREATE FUNCTION windlass.clock() RETURNS timestamp with time zone
    LANGUAGE sql PARALLEL SAFE
    AS $$SELECT clock_timestamp()$$;

CREATE FUNCTION windlass.detach_history_partition(name text) RETURNS void
    LANGUAGE plpgsql
    AS $$
DECLARE
    home constant text := (
        SELECT n.nspname FROM pg_namespace n JOIN pg_class c ON c.relnamespace = n.oid
        WHERE c.oid = 'windlass.history'::regclass
    );
BEGIN
    PERFORM set_config('lock_timeout', '100ms', true);
    EXECUTE format('ALTER TABLE windlass.history DETACH PARTITION %I.%I', home, name);
END
$$;

CREATE FUNCTION windlass.drop_day(ended timestamp with time zone, own_seconds integer, retention interval, key text, key_retention interval) RETURNS date
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    AS $$
SELECT ((ended AT TIME ZONE 'UTC') + greatest(
    coalesce(own_seconds * interval '1 second', retention),
    CASE WHEN key IS NOT NULL THEN key_retention ELSE interval '0' END
))::date
$$;

CREATE FUNCTION windlass.drop_history_partition(name text) RETURNS void
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
    EXECUTE format('DROP TABLE %I.%I', home, name);
END
$$;

CREATE FUNCTION windlass.enqueue_tasks(task_ids uuid[], types text[], queues text[], priorities smallint[], payloads text[], max_attempts smallint[], delays double precision[], due_times timestamp with time zone[], keys text[], tag_lists text[], retentions integer[], fence_token uuid, fence_task uuid, fence_generation integer, repeated boolean, caller_commits boolean) RETURNS TABLE(ordinal integer, task_id uuid)
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
            RAISE EXCEPTION 'task %: the lease is lost', fence_task USING ERRCODE = 'WL001';
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

CREATE FUNCTION windlass.folded_attempts(ended_task uuid) RETURNS jsonb
    LANGUAGE sql STABLE
    AS $$
SELECT jsonb_agg(
    a.error || jsonb_build_object(
        'attempt', a.attempt, 'generation', a.generation, 'worker_id', a.worker_id,
        'started_at', a.started_at, 'ended_at', a.ended_at
    )
    ORDER BY a.generation
)
FROM windlass.attempt a
WHERE a.task_id = ended_task
$$;

CREATE FUNCTION windlass.lane_number(queue text, type text, priority smallint, kind smallint) RETURNS bigint
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    AS $$
SELECT hashtextextended(
    (queue || E'\x1f' || type || E'\x1f' || priority::text || E'\x1f' || kind::text) COLLATE "C",
    0
)
$$;

CREATE FUNCTION windlass.promote_due(max_tasks integer, all_of_them boolean) RETURNS integer
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    AS $$
DECLARE
    promoted integer;
    lanes bigint[];
    -- Values, since a volatile call is no condition that an index can be searched by.
    latest constant timestamptz := windlass.clock();
    earliest constant timestamptz := CASE WHEN all_of_them THEN '-infinity'
        ELSE latest - interval '2 seconds' END;
BEGIN
    WITH due AS MATERIALIZED (
        SELECT s.ctid AS place, s.task_id, s.lane, s.generation, s.due
        FROM windlass.scheduled s
        WHERE s.due <= latest AND s.due > earliest
        ORDER BY s.due, s.task_id
        LIMIT max_tasks
        FOR UPDATE SKIP LOCKED
    ), gone AS (
        DELETE FROM windlass.scheduled s
        USING due d
        WHERE s.ctid = d.place
        RETURNING d.task_id, d.lane, d.generation, d.due
    ), added AS (
        INSERT INTO windlass.ready (lane, task_id, generation, ready_at)
        SELECT g.lane, g.task_id, g.generation, g.due
        FROM gone g
        ORDER BY g.due, g.task_id
        RETURNING lane
    )
    SELECT count(*), array_agg(DISTINCT a.lane) INTO promoted, lanes FROM added a;
    IF promoted > 0 THEN
        PERFORM windlass.relist_lanes(lanes);
        PERFORM windlass.wake(false);
    END IF;
    RETURN promoted;
END
$$;

CREATE FUNCTION windlass.refuse_change() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
BEGIN
    IF TG_OP = 'DELETE' AND current_setting('windlass_internal.removing', true) = 'on' THEN
        RETURN OLD;
    END IF;
    RAISE EXCEPTION 'task % has ended as %: it cannot be changed', OLD.id, OLD.status
        USING ERRCODE = 'WL003', HINT = 'retry reopens an unsuccessful task';
END
$$;

CREATE FUNCTION windlass.refuse_older_generation() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
BEGIN
    RAISE EXCEPTION 'task %: generation % cannot follow %', OLD.id, NEW.generation, OLD.generation
        USING ERRCODE = 'WL003';
END
$$;

CREATE FUNCTION windlass.relist_busy_lanes() RETURNS integer
    LANGUAGE plpgsql
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    AS $$
BEGIN
    RETURN windlass.relist_lanes(ARRAY(
        SELECT s.lane
        FROM windlass.resting_lane s
        CROSS JOIN LATERAL (
            SELECT FROM windlass.ready r WHERE r.lane = s.lane ORDER BY r.x, r.n LIMIT 1
        ) b
        WHERE NOT EXISTS (SELECT FROM windlass.lane l WHERE l.lane = ANY (ARRAY[s.lane]))
    ));
END
$$;

CREATE FUNCTION windlass.relist_lanes(lanes bigint[]) RETURNS integer
    LANGUAGE sql
    AS $$
WITH listed AS (
    INSERT INTO windlass.lane (lane, queue, type, priority, kind)
    SELECT r.lane, r.queue, r.type, r.priority, r.kind
    FROM windlass.resting_lane r
    WHERE r.lane = ANY (lanes)
        AND NOT EXISTS (SELECT FROM windlass.lane l WHERE l.lane = r.lane)
    RETURNING lane
)
SELECT count(*)::integer FROM listed
$$;

CREATE FUNCTION windlass.rescue_claims(max_claims integer, dead_retention interval, retention interval, key_retention interval) RETURNS TABLE(claims integer, returned integer, lost_attempts integer, dead integer, cancelled integer)
    LANGUAGE plpgsql
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET lock_timeout TO '100ms'
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

CREATE FUNCTION windlass.retire_lanes(listed_for interval) RETURNS integer
    LANGUAGE plpgsql
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    AS $$
DECLARE
    retired integer;
BEGIN
    WITH empty AS MATERIALIZED (
        SELECT l.ctid AS place
        FROM windlass.lane l
        WHERE l.listed_at <= windlass.clock() - listed_for
            AND NOT EXISTS (SELECT FROM windlass.ready r WHERE r.lane = ANY (ARRAY[l.lane]))
        FOR UPDATE OF l SKIP LOCKED
    ), gone AS (
        DELETE FROM windlass.lane l
        USING empty e
        WHERE l.ctid = e.place
        RETURNING l.lane, l.queue, l.type, l.priority, l.kind
    ), resting AS (
        INSERT INTO windlass.resting_lane (lane, queue, type, priority, kind)
        SELECT g.lane, g.queue, g.type, g.priority, g.kind
        FROM gone g
        ON CONFLICT DO NOTHING
    )
    SELECT count(*) INTO retired FROM gone;
    RETURN retired;
END
$$;

CREATE FUNCTION windlass.retry_task(reopened uuid) RETURNS boolean
    LANGUAGE plpgsql
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
    DELETE FROM windlass.cancel_request q WHERE q.task_id = reopened;
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

CREATE FUNCTION windlass.settle_tasks(tokens uuid[], task_ids uuid[], generations integer[], outcomes text[], started_after double precision[], results text[], delays double precision[], errors text[], reported boolean[], retention interval, dead_retention interval, key_retention interval, patience interval) RETURNS TABLE(ordinal integer, before boolean)
    LANGUAGE plpgsql
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    AS $$
#variable_conflict use_column
DECLARE
    held uuid[];
    workers uuid[];
    claim_times timestamptz[];
    settled bigint[] := '{}';
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

        PERFORM FROM windlass.claim c WHERE c.token = ANY (held) ORDER BY c.token FOR NO KEY UPDATE;
        WITH counted AS MATERIALIZED (
            SELECT tokens[s.ordinal] AS token, count(*)::integer AS tasks
            FROM unnest(settled) AS s (ordinal)
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

CREATE FUNCTION windlass.start_tasks(tokens uuid[], task_ids uuid[], generations integer[], started_after double precision[]) RETURNS SETOF uuid
    LANGUAGE plpgsql
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    AS $$
BEGIN
    PERFORM FROM windlass.claim c WHERE c.token = ANY (tokens) ORDER BY c.token FOR KEY SHARE;
    RETURN QUERY
    WITH asked AS MATERIALIZED (
        SELECT u.token, u.task_id, u.generation, c.claimed_at + u.after * interval '1 second' AS at
        FROM unnest(tokens, task_ids, generations, started_after) AS u (token, task_id, generation, after)
        LEFT JOIN windlass.claim c ON c.token = u.token
    ), noted AS (
        INSERT INTO windlass.running AS r (task_id, generation, token, started_at)
        SELECT a.task_id, a.generation, a.token, a.at
        FROM asked a
        JOIN windlass.task t ON t.id = ANY (ARRAY[a.task_id]) AND t.generation = a.generation
        WHERE a.at IS NOT NULL
        ORDER BY a.task_id
        ON CONFLICT (task_id) DO UPDATE
        SET generation = excluded.generation, token = excluded.token, started_at = excluded.started_at
        RETURNING r.task_id
    )
    SELECT a.task_id FROM asked a
    WHERE NOT EXISTS (SELECT FROM noted n WHERE n.task_id = a.task_id);
END
$$;

CREATE FUNCTION windlass.take_waiting(waiting uuid) RETURNS boolean
    LANGUAGE plpgsql
    AS $$
BEGIN
    FOR turn IN 1..100 LOOP
        DELETE FROM windlass.scheduled s WHERE s.task_id = waiting;
        IF FOUND THEN
            RETURN true;
        END IF;
        DELETE FROM windlass.ready r WHERE r.task_id = waiting;
        IF FOUND THEN
            RETURN true;
        END IF;
        IF NOT EXISTS (SELECT FROM windlass.scheduled s WHERE s.task_id = waiting)
            AND NOT EXISTS (SELECT FROM windlass.ready r WHERE r.task_id = waiting) THEN
            RETURN false;
        END IF;
    END LOOP;
    RAISE EXCEPTION 'task % moved between its places a hundred times', waiting
        USING ERRCODE = 'serialization_failure';
END
$$;

CREATE FUNCTION windlass.wake(always boolean) RETURNS void
    LANGUAGE sql
    AS $$
SELECT pg_notify('windlass.wake', '')
WHERE always OR EXISTS (SELECT FROM windlass.worker_pulse WHERE idle)
$$;

CREATE TABLE windlass.attempt (
    task_id uuid NOT NULL,
    generation integer NOT NULL,
    attempt smallint NOT NULL,
    worker_id uuid,
    started_at timestamp with time zone,
    ended_at timestamp with time zone NOT NULL,
    error jsonb NOT NULL
);

CREATE TABLE windlass.cancel_request (
    task_id uuid NOT NULL,
    reason text NOT NULL,
    requested_at timestamp with time zone NOT NULL
);

CREATE TABLE windlass.claim (
    token uuid NOT NULL,
    fence bigint NOT NULL,
    worker_id uuid NOT NULL,
    claimed_at timestamp with time zone NOT NULL,
    expires_at timestamp with time zone NOT NULL,
    remaining integer NOT NULL,
    CONSTRAINT claim_remaining_check CHECK ((remaining >= 0))
)
WITH (fillfactor='50', autovacuum_vacuum_scale_factor='0.05', autovacuum_vacuum_threshold='1000');

ALTER TABLE windlass.claim ALTER COLUMN fence ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME windlass.claim_fence_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE windlass.claim_task (
    token uuid NOT NULL,
    task_ids uuid[] NOT NULL,
    generations integer[] NOT NULL
)
WITH (autovacuum_vacuum_scale_factor='0.05', autovacuum_vacuum_threshold='1000');

CREATE TABLE windlass.dead (
    id uuid NOT NULL,
    type text NOT NULL,
    queue text NOT NULL,
    status windlass.task_status NOT NULL,
    priority smallint NOT NULL,
    max_attempts smallint NOT NULL,
    attempts smallint NOT NULL,
    generation integer NOT NULL,
    retention_seconds integer,
    drop_on date NOT NULL,
    created_at timestamp with time zone NOT NULL,
    scheduled_for timestamp with time zone NOT NULL,
    claimed_at timestamp with time zone,
    started_at timestamp with time zone,
    completed_at timestamp with time zone NOT NULL,
    worker_id uuid,
    token uuid,
    idempotency_key text,
    payload jsonb NOT NULL,
    tags text[],
    result jsonb,
    last_error text,
    errors jsonb,
    CONSTRAINT dead_status_check CHECK ((status = ANY (ARRAY['failed'::windlass.task_status, 'dead'::windlass.task_status])))
);

CREATE TABLE windlass.history (
    id uuid NOT NULL,
    type text NOT NULL,
    queue text NOT NULL,
    status windlass.task_status NOT NULL,
    priority smallint NOT NULL,
    max_attempts smallint NOT NULL,
    attempts smallint NOT NULL,
    generation integer NOT NULL,
    retention_seconds integer,
    drop_on date NOT NULL,
    created_at timestamp with time zone NOT NULL,
    scheduled_for timestamp with time zone NOT NULL,
    claimed_at timestamp with time zone,
    started_at timestamp with time zone,
    completed_at timestamp with time zone NOT NULL,
    worker_id uuid,
    token uuid,
    idempotency_key text,
    payload jsonb NOT NULL,
    tags text[],
    result jsonb,
    last_error text,
    errors jsonb,
    CONSTRAINT history_status_check CHECK ((status = ANY (ARRAY['completed'::windlass.task_status, 'cancelled'::windlass.task_status])))
)
PARTITION BY RANGE (drop_on);

CREATE TABLE windlass.idempotency (
    type text NOT NULL,
    key text NOT NULL,
    task_id uuid NOT NULL,
    fingerprint bigint NOT NULL
);

CREATE TABLE windlass.lane (
    lane bigint NOT NULL,
    queue text NOT NULL,
    type text NOT NULL,
    priority smallint NOT NULL,
    kind smallint NOT NULL,
    listed_at timestamp with time zone DEFAULT windlass.clock() NOT NULL,
    CONSTRAINT lane_kind_check CHECK (((kind >= 0) AND (kind <= 2)))
);

CREATE TABLE windlass.leadership (
    seat boolean DEFAULT true NOT NULL,
    holder uuid,
    term bigint NOT NULL,
    expires_at timestamp with time zone NOT NULL,
    CONSTRAINT leadership_seat_check CHECK (seat)
);

CREATE TABLE windlass.migration (
    number integer NOT NULL,
    name text NOT NULL,
    applied_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL
);

CREATE TABLE windlass.queue (
    name text NOT NULL,
    paused_at timestamp with time zone
);

CREATE TABLE windlass.ready (
    lane bigint NOT NULL,
    x xid8 DEFAULT pg_current_xact_id() NOT NULL,
    n bigint NOT NULL,
    task_id uuid NOT NULL,
    generation integer NOT NULL,
    ready_at timestamp with time zone NOT NULL
)
WITH (autovacuum_vacuum_scale_factor='0.05', autovacuum_vacuum_threshold='1000');

ALTER TABLE windlass.ready ALTER COLUMN n ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME windlass.ready_n_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 100
);

CREATE TABLE windlass.resting_lane (
    lane bigint NOT NULL,
    queue text NOT NULL,
    type text NOT NULL,
    priority smallint NOT NULL,
    kind smallint NOT NULL
);

CREATE TABLE windlass.running (
    task_id uuid NOT NULL,
    generation integer NOT NULL,
    token uuid NOT NULL,
    started_at timestamp with time zone NOT NULL
);

CREATE TABLE windlass.scheduled (
    task_id uuid NOT NULL,
    lane bigint NOT NULL,
    generation integer NOT NULL,
    due timestamp with time zone NOT NULL
)
WITH (autovacuum_vacuum_scale_factor='0.05', autovacuum_vacuum_threshold='1000');

CREATE TABLE windlass.task (
    id uuid NOT NULL,
    type text NOT NULL,
    queue text NOT NULL,
    priority smallint NOT NULL,
    max_attempts smallint NOT NULL,
    attempts smallint DEFAULT 0 NOT NULL,
    recoveries smallint DEFAULT 0 NOT NULL,
    generation integer DEFAULT 1 NOT NULL,
    retention_seconds integer,
    created_at timestamp with time zone NOT NULL,
    scheduled_for timestamp with time zone NOT NULL,
    returned_by uuid,
    idempotency_key text,
    payload jsonb NOT NULL,
    tags text[],
    CONSTRAINT attempts_are_left CHECK ((attempts < max_attempts)),
    CONSTRAINT task_attempts_check CHECK ((attempts >= 0)),
    CONSTRAINT task_generation_check CHECK ((generation > 0)),
    CONSTRAINT task_max_attempts_check CHECK ((max_attempts > 0)),
    CONSTRAINT task_payload_check CHECK ((jsonb_typeof(payload) = 'object'::text)),
    CONSTRAINT task_priority_check CHECK (((priority >= 0) AND (priority <= 100))),
    CONSTRAINT task_recoveries_check CHECK ((recoveries >= 0)),
    CONSTRAINT task_retention_seconds_check CHECK ((retention_seconds >= 0))
);

CREATE TABLE windlass.task_type (
    name text NOT NULL,
    queue text NOT NULL,
    priority smallint NOT NULL,
    max_attempts smallint NOT NULL,
    retention_seconds integer,
    registered_at timestamp with time zone NOT NULL,
    CONSTRAINT task_type_max_attempts_check CHECK ((max_attempts > 0)),
    CONSTRAINT task_type_priority_check CHECK (((priority >= 0) AND (priority <= 100)))
);

CREATE VIEW windlass.tasks AS
 SELECT t.id,
    t.type,
    t.queue,
    t.payload,
    (
        CASE
            WHEN (r.task_id IS NOT NULL) THEN 'pending'::text
            WHEN (s.task_id IS NOT NULL) THEN 'scheduled'::text
            WHEN (u.task_id IS NOT NULL) THEN 'running'::text
            ELSE 'claimed'::text
        END)::windlass.task_status AS status,
    t.priority,
    t.idempotency_key,
    c.worker_id,
    t.created_at,
    t.scheduled_for,
    c.claimed_at,
    u.started_at,
    NULL::timestamp with time zone AS completed_at,
    GREATEST(t.created_at, c.claimed_at, u.started_at, a.ended_at) AS updated_at,
    t.attempts,
    t.max_attempts,
    (a.error ->> 'message'::text) AS last_error,
    NULL::jsonb AS result,
    t.tags,
    t.generation
   FROM (((((windlass.task t
     LEFT JOIN windlass.ready r ON ((r.task_id = t.id)))
     LEFT JOIN windlass.scheduled s ON ((s.task_id = t.id)))
     LEFT JOIN windlass.running u ON (((u.task_id = t.id) AND (u.generation = t.generation))))
     LEFT JOIN ( SELECT c_1.worker_id,
            c_1.claimed_at,
            k.task_id,
            k.generation
           FROM ((windlass.claim c_1
             JOIN windlass.claim_task b ON ((b.token = c_1.token)))
             CROSS JOIN LATERAL UNNEST(b.task_ids, b.generations) k(task_id, generation))) c ON (((c.task_id = t.id) AND (c.generation = t.generation))))
     LEFT JOIN LATERAL ( SELECT f.error,
            f.ended_at
           FROM windlass.attempt f
          WHERE ((t.generation > 1) AND (f.task_id = t.id))
          ORDER BY f.generation DESC
         LIMIT 1) a ON (true))
UNION ALL
 SELECT h.id,
    h.type,
    h.queue,
    h.payload,
    h.status,
    h.priority,
    h.idempotency_key,
    h.worker_id,
    h.created_at,
    h.scheduled_for,
    h.claimed_at,
    h.started_at,
    h.completed_at,
    h.completed_at AS updated_at,
    h.attempts,
    h.max_attempts,
    h.last_error,
    h.result,
    h.tags,
    h.generation
   FROM windlass.history h
UNION ALL
 SELECT d.id,
    d.type,
    d.queue,
    d.payload,
    d.status,
    d.priority,
    d.idempotency_key,
    d.worker_id,
    d.created_at,
    d.scheduled_for,
    d.claimed_at,
    d.started_at,
    d.completed_at,
    d.completed_at AS updated_at,
    d.attempts,
    d.max_attempts,
    d.last_error,
    d.result,
    d.tags,
    d.generation
   FROM windlass.dead d;

CREATE TABLE windlass.worker (
    id uuid NOT NULL,
    host text NOT NULL,
    pid integer NOT NULL,
    version text NOT NULL,
    capacity integer NOT NULL,
    types text[] NOT NULL,
    queues text[],
    started_at timestamp with time zone NOT NULL
);

CREATE TABLE windlass.worker_pulse (
    worker_id uuid NOT NULL,
    heartbeat_at timestamp with time zone NOT NULL,
    expires_at timestamp with time zone NOT NULL,
    running integer NOT NULL,
    idle boolean NOT NULL
)
WITH (fillfactor='50');

CREATE VIEW windlass.workers AS
 SELECT w.id,
    w.host,
    w.pid,
    w.version,
    w.capacity,
    w.types,
    w.queues,
    w.started_at,
    p.heartbeat_at,
    p.running,
    p.idle,
    COALESCE(((l.holder = w.id) AND (l.expires_at > windlass.clock())), false) AS leader
   FROM ((windlass.worker w
     JOIN windlass.worker_pulse p ON ((p.worker_id = w.id)))
     CROSS JOIN windlass.leadership l);

ALTER TABLE ONLY windlass.attempt
    ADD CONSTRAINT attempt_pkey PRIMARY KEY (task_id, generation);

ALTER TABLE ONLY windlass.cancel_request
    ADD CONSTRAINT cancel_request_pkey PRIMARY KEY (task_id);

ALTER TABLE ONLY windlass.claim
    ADD CONSTRAINT claim_pkey PRIMARY KEY (token);

ALTER TABLE ONLY windlass.claim_task
    ADD CONSTRAINT claim_task_pkey PRIMARY KEY (token);

ALTER TABLE ONLY windlass.dead
    ADD CONSTRAINT dead_pkey PRIMARY KEY (id);

ALTER TABLE ONLY windlass.idempotency
    ADD CONSTRAINT idempotency_pkey PRIMARY KEY (type, key);

ALTER TABLE ONLY windlass.leadership
    ADD CONSTRAINT leadership_pkey PRIMARY KEY (seat);

ALTER TABLE ONLY windlass.migration
    ADD CONSTRAINT migration_pkey PRIMARY KEY (number);

ALTER TABLE ONLY windlass.queue
    ADD CONSTRAINT queue_pkey PRIMARY KEY (name);

ALTER TABLE ONLY windlass.resting_lane
    ADD CONSTRAINT resting_lane_pkey PRIMARY KEY (lane);

ALTER TABLE ONLY windlass.running
    ADD CONSTRAINT running_pkey PRIMARY KEY (task_id);

ALTER TABLE ONLY windlass.scheduled
    ADD CONSTRAINT scheduled_pkey PRIMARY KEY (task_id);

ALTER TABLE ONLY windlass.task
    ADD CONSTRAINT task_pkey PRIMARY KEY (id);

ALTER TABLE ONLY windlass.task_type
    ADD CONSTRAINT task_type_pkey PRIMARY KEY (name);

ALTER TABLE ONLY windlass.worker
    ADD CONSTRAINT worker_pkey PRIMARY KEY (id);

ALTER TABLE ONLY windlass.worker_pulse
    ADD CONSTRAINT worker_pulse_pkey PRIMARY KEY (worker_id);

CREATE INDEX dead_drop_on ON windlass.dead USING btree (drop_on);

CREATE INDEX lane_number ON windlass.lane USING btree (lane);

CREATE INDEX lane_type ON windlass.lane USING btree (type);

CREATE INDEX ready_order ON windlass.ready USING btree (lane, x, n);

CREATE UNIQUE INDEX ready_task ON windlass.ready USING btree (task_id);

CREATE INDEX scheduled_due ON windlass.scheduled USING btree (due, task_id);

CREATE TRIGGER dead_is_final BEFORE DELETE OR UPDATE ON windlass.dead FOR EACH ROW EXECUTE FUNCTION windlass.refuse_change();

CREATE TRIGGER generation_never_falls BEFORE UPDATE ON windlass.task FOR EACH ROW WHEN (((new.generation < old.generation) OR (new.id <> old.id))) EXECUTE FUNCTION windlass.refuse_older_generation();

CREATE TRIGGER history_is_final BEFORE DELETE OR UPDATE ON windlass.history FOR EACH ROW EXECUTE FUNCTION windlass.refuse_change();
