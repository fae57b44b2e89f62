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
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET lock_timeout TO '2s'
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

CREATE FUNCTION windlass.answer_calls(max_calls integer, all_of_them boolean) RETURNS integer
    LANGUAGE plpgsql
    SET enable_hashjoin TO 'on'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET jit TO 'off'
    AS $$
DECLARE
    -- Values, since a volatile call is no condition that an index can be searched by.
    latest constant timestamptz := windlass.clock();
    earliest constant timestamptz := CASE WHEN all_of_them THEN '-infinity'
        ELSE latest - interval '10 seconds' END;
    most_newest constant integer := max_calls / 2;
    called bigint[];
    leaving uuid[];
BEGIN
    WITH oldest AS MATERIALIZED (
        SELECT c.ctid AS place, c.gate, c.leaving
        FROM windlass.gate_call c
        WHERE c.due <= latest AND c.due > earliest
        ORDER BY c.due
        LIMIT max_calls - most_newest
        FOR UPDATE SKIP LOCKED
    ), newest AS MATERIALIZED (
        SELECT c.ctid AS place, c.gate, c.leaving
        FROM windlass.gate_call c
        WHERE c.due <= latest AND c.due > earliest
            -- There are more than the oldest.
            AND (SELECT count(*) FROM oldest) = max_calls - most_newest
        ORDER BY c.due DESC
        LIMIT most_newest
        FOR UPDATE SKIP LOCKED
    ), due AS MATERIALIZED (
        SELECT o.place, o.gate, o.leaving FROM oldest o
        UNION
        SELECT n.place, n.gate, n.leaving FROM newest n
    ), also AS MATERIALIZED (
        -- Where there are many, those that call the same gates: each is looked at once.
        SELECT c.ctid AS place, c.gate, c.leaving
        FROM windlass.gate_call c
        WHERE (SELECT count(*) FROM due) = max_calls AND c.ctid = ANY (ARRAY(
            SELECT w.place
            FROM (
                SELECT c.ctid AS place, c.gate
                FROM windlass.gate_call c
                WHERE c.due <= latest AND c.due > earliest
                ORDER BY c.due
                LIMIT 5 * max_calls
            ) w
            WHERE w.gate IN (SELECT d.gate FROM due d) AND w.place NOT IN (SELECT d.place FROM due d)
        ))
        FOR UPDATE SKIP LOCKED
    ), taken AS MATERIALIZED (
        SELECT d.place, d.gate, d.leaving FROM due d UNION ALL SELECT a.place, a.gate, a.leaving FROM also a
    ), gone AS (
        DELETE FROM windlass.gate_call c USING taken t WHERE c.ctid = t.place
    )
    SELECT array_agg(t.gate), array_agg(t.leaving) FILTER (WHERE t.leaving IS NOT NULL)
    INTO called, leaving
    FROM taken t;
    IF called IS NULL THEN
        RETURN 0;
    END IF;
    PERFORM windlass.pass_gates(called, '{}', '{}', coalesce(leaving, '{}'));
    RETURN cardinality(called);
END
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

CREATE FUNCTION windlass.bury_ready(stopped text, from_lane bigint, from_x bigint, from_n bigint, max_looks integer, max_tasks integer, dead_retention interval, key_retention interval) RETURNS TABLE(buried integer, next_lane bigint, next_x bigint, next_n bigint)
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET lock_timeout TO '2s'
    AS $$
DECLARE
    why constant text := windlass.why_stopped(stopped);
    here constant bigint := windlass.lane_of_type(stopped, from_lane);
    after_x xid8 := '0';
    after_n bigint := 0;
    is_end boolean;  -- of the lane
    came_again uuid[];
    taken uuid[];
BEGIN
    buried := 0;
    IF why IS NULL OR here IS NULL THEN
        RETURN NEXT;
        RETURN;
    END IF;
    IF here = from_lane THEN
        after_x := from_x::text::xid8;
        after_n := from_n;
    END IF;

    -- A first attempt is of the first generation: most tasks are passed over without a look at their own rows.
    WITH seen AS MATERIALIZED (
        SELECT r.task_id, r.generation, r.x, r.n
        FROM windlass.ready r
        WHERE r.lane = here AND (r.x, r.n) > (after_x, after_n)
        ORDER BY r.lane, r.x, r.n
        LIMIT max_looks
    ), counted AS (
        SELECT s.*, count(*) FILTER (WHERE s.generation > 1) OVER (ORDER BY s.x, s.n) AS found
        FROM seen s
    ), page AS (
        SELECT
            array_agg(c.task_id) FILTER (WHERE c.generation > 1) AS ids, count(*) AS looks,
            (array_agg(c.x ORDER BY c.x DESC, c.n DESC))[1] AS x,
            (array_agg(c.n ORDER BY c.x DESC, c.n DESC))[1] AS n
        FROM counted c
        WHERE c.found <= max_tasks
    )
    SELECT p.ids, here, p.x::text::bigint, p.n, p.looks < max_looks AND p.looks = (SELECT count(*) FROM seen)
    INTO came_again, next_lane, next_x, next_n, is_end
    FROM page p;
    IF is_end THEN
        next_lane := here + 1;
        next_x := 0;
        next_n := 0;
    END IF;

    IF came_again IS NOT NULL THEN
        SELECT array_agg(f.task_id) INTO taken
        FROM (
            SELECT r.task_id FROM windlass.ready r WHERE r.task_id = ANY (came_again)
            ORDER BY r.task_id FOR UPDATE SKIP LOCKED
        ) f;
        SELECT array_agg(f.id) INTO taken
        FROM (
            SELECT t.id FROM windlass.task t WHERE t.id = ANY (taken) AND t.attempts > 0
            ORDER BY t.id FOR UPDATE SKIP LOCKED
        ) f;
    END IF;
    IF taken IS NOT NULL THEN
        DELETE FROM windlass.ready r WHERE r.task_id = ANY (taken);
        PERFORM windlass.bury_tasks(taken, why, NULL, dead_retention, key_retention);
        buried := cardinality(taken);
    END IF;
    RETURN NEXT;
END
$$;

CREATE FUNCTION windlass.bury_retries(stopped text, max_tasks integer, dead_retention interval, key_retention interval) RETURNS integer
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
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

CREATE FUNCTION windlass.bury_scheduled(stopped text, from_lane bigint, from_id uuid, max_looks integer, max_tasks integer, dead_retention interval, key_retention interval) RETURNS TABLE(buried integer, next_lane bigint, next_id uuid)
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    SET lock_timeout TO '2s'
    AS $$
DECLARE
    why constant text := windlass.why_stopped(stopped);
    nobody constant uuid := '00000000-0000-0000-0000-000000000000';
    here constant bigint := windlass.lane_of_type(stopped, from_lane);
    is_end boolean;  -- of the lane
    came_again uuid[];
    taken uuid[];
BEGIN
    buried := 0;
    IF why IS NULL OR here IS NULL THEN
        RETURN NEXT;
        RETURN;
    END IF;

    -- A first attempt is of the first generation: most tasks are passed over without a look at their own rows. No
    -- equation: by one the server would know that the order of ids is enough, and might read all other lanes too.
    WITH seen AS MATERIALIZED (
        SELECT w.task_id, w.generation
        FROM windlass.scheduled w
        WHERE w.lane BETWEEN here AND here
            AND (w.lane, w.task_id) > (here, CASE WHEN here = from_lane THEN from_id ELSE nobody END)
        ORDER BY w.lane, w.task_id
        LIMIT max_looks
    ), counted AS (
        SELECT s.*, count(*) FILTER (WHERE s.generation > 1) OVER (ORDER BY s.task_id) AS found
        FROM seen s
    ), page AS (
        SELECT
            array_agg(c.task_id) FILTER (WHERE c.generation > 1) AS ids, count(*) AS looks,
            (array_agg(c.task_id ORDER BY c.task_id DESC))[1] AS last
        FROM counted c
        WHERE c.found <= max_tasks
    )
    SELECT p.ids, here, p.last, p.looks < max_looks AND p.looks = (SELECT count(*) FROM seen)
    INTO came_again, next_lane, next_id, is_end
    FROM page p;
    IF is_end THEN
        next_lane := here + 1;
        next_id := nobody;
    END IF;

    IF came_again IS NOT NULL THEN
        SELECT array_agg(f.task_id) INTO taken
        FROM (
            SELECT w.task_id FROM windlass.scheduled w WHERE w.task_id = ANY (came_again)
            ORDER BY w.task_id FOR UPDATE SKIP LOCKED
        ) f;
        SELECT array_agg(f.id) INTO taken
        FROM (
            SELECT t.id FROM windlass.task t WHERE t.id = ANY (taken) AND t.attempts > 0
            ORDER BY t.id FOR UPDATE SKIP LOCKED
        ) f;
    END IF;
    IF taken IS NOT NULL THEN
        DELETE FROM windlass.scheduled w WHERE w.task_id = ANY (taken);
        PERFORM windlass.bury_tasks(taken, why, NULL, dead_retention, key_retention);
        buried := cardinality(taken);
    END IF;
    RETURN NEXT;
END
$$;

CREATE FUNCTION windlass.bury_tasks(buried uuid[], why text, ended_by uuid, dead_retention interval, key_retention interval) RETURNS void
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET enable_material TO 'off'
    SET jit TO 'off'
    AS $$
DECLARE
    at constant timestamptz := windlass.clock();
BEGIN
    WITH gone AS (
        DELETE FROM windlass.task t WHERE t.id = ANY (buried) RETURNING t.*
    ), kept AS (
        INSERT INTO windlass.dead (
            id, type, queue, status, priority, max_attempts, attempts, generation,
            retention_seconds, drop_on, created_at, scheduled_for, completed_at, token,
            idempotency_key, payload, tags, last_error, errors
        )
        SELECT
            g.id, g.type, g.queue, 'dead', g.priority, g.max_attempts, g.attempts, g.generation,
            g.retention_seconds,
            windlass.drop_day(at, g.retention_seconds, dead_retention, g.idempotency_key, key_retention),
            g.created_at, g.scheduled_for, at, ended_by, g.idempotency_key, g.payload, g.tags,
            e.errors -> -1 ->> 'message',
            jsonb_set(e.errors, '{-1,given_up}', to_jsonb(why))
        FROM gone g
        CROSS JOIN LATERAL (SELECT windlass.folded_attempts(g.id) AS errors) e
    ), answered AS (
        DELETE FROM windlass.cancel_request q USING gone g WHERE q.task_id = ANY (ARRAY[g.id])
    )
    DELETE FROM windlass.attempt a USING gone g WHERE a.task_id = ANY (ARRAY[g.id]);
    PERFORM windlass.call_gates(buried);
    PERFORM windlass.call_back(buried);
END
$$;

CREATE FUNCTION windlass.call_back(ended uuid[]) RETURNS void
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET jit TO 'off'
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

CREATE FUNCTION windlass.call_changed() RETURNS void
    LANGUAGE plpgsql
    AS $$
DECLARE
    at constant timestamptz := windlass.clock();
    changed text[];
BEGIN
    IF EXISTS (SELECT FROM windlass.value_rule_change) THEN
        -- What another looks at just now is left to that one, who may wait for a gate.
        WITH mine AS MATERIALIZED (
            SELECT c.ctid AS place
            FROM windlass.value_rule_change c
            WHERE c.seen_before <= pg_snapshot_xmin(pg_current_snapshot()) OR c.changed_at < at - interval '1 minute'
            FOR UPDATE SKIP LOCKED
        ), over AS (
            DELETE FROM windlass.value_rule_change c
            WHERE c.ctid = ANY (ARRAY(SELECT m.place FROM mine m))
            RETURNING c.type
        )
        SELECT array_agg(DISTINCT o.type) INTO changed FROM over o;
        INSERT INTO windlass.gate_call (gate, due) SELECT g.gate, at FROM windlass.gate g WHERE g.type = ANY (changed);
        WITH mine AS MATERIALIZED (
            SELECT c.ctid AS place FROM windlass.value_rule_change c WHERE c.seen_before IS NULL FOR UPDATE SKIP LOCKED
        )
        UPDATE windlass.value_rule_change c
        SET seen_before = pg_snapshot_xmax(pg_current_snapshot())
        WHERE c.ctid = ANY (ARRAY(SELECT m.place FROM mine m));
    END IF;
END
$$;

CREATE FUNCTION windlass.call_gates(task_ids uuid[]) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
BEGIN
    IF EXISTS (SELECT FROM windlass.gate_used) THEN
        INSERT INTO windlass.gate_call (gate, due, leaving)
        SELECT l.gate, windlass.clock(), l.task_id
        FROM windlass.left_by(task_ids) l
        WHERE NOT EXISTS (SELECT FROM windlass.gate_call c WHERE c.leaving = ANY (ARRAY[l.task_id]) AND c.gate = l.gate);
        IF FOUND THEN
            PERFORM windlass.wake(false);
        END IF;
    END IF;
END
$$;

CREATE FUNCTION windlass.cancel(id uuid, reason text DEFAULT 'cancelled on request'::text) RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
DECLARE
    settings windlass.setting;
    answer text;
    day date;
BEGIN
    IF id IS NULL THEN
        PERFORM windlass.refuse('WL007', 'null is not the id of a task; ids are UUIDs');
    ELSIF reason IS NULL THEN
        PERFORM windlass.refuse('WL006', 'reason null must be a string');
    ELSIF length(reason) > 2000 THEN
        PERFORM windlass.refuse('WL006', format('reason %s has %s characters; use at most 2000',
            windlass.shown(to_jsonb(reason)), length(reason)));
    END IF;
    SELECT * INTO settings FROM windlass.setting;
    BEGIN
        answer := windlass.cancel_task(id, reason, settings.retention, settings.key_retention);
    EXCEPTION WHEN check_violation THEN
        -- The partition of its last day is not there yet: workers make them ahead.
        SELECT windlass.drop_day(windlass.clock(), t.retention_seconds, settings.retention,
            t.idempotency_key, settings.key_retention)
        INTO day FROM windlass.task t WHERE t.id = cancel.id;
        PERFORM windlass.add_history_partition(day, day + 1);
        answer := windlass.cancel_task(id, reason, settings.retention, settings.key_retention);
    END;
    IF answer IS NULL THEN
        PERFORM windlass.refuse('WL007',
            format('task %s is not known: it never existed, or its retention is over', id));
    END IF;
    RETURN answer <> 'ended';
END
$$;

CREATE FUNCTION windlass.cancel_task(cancelled uuid, why text, retention interval, key_retention interval) RETURNS text
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
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

CREATE FUNCTION windlass.cancel_tasks(cancelled uuid[], why text, retention interval, key_retention interval) RETURNS TABLE(task_id uuid, answer text)
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET enable_material TO 'off'
    SET jit TO 'off'
    SET lock_timeout TO '100ms'
    AS $$
#variable_conflict use_column
DECLARE
    claimed uuid[];
    generations integer[];
    added uuid[] := '{}';  -- requests that are new
    held uuid[] := '{}';
    requested uuid[];
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
            AND NOT EXISTS (
                SELECT FROM windlass.gate_entry e WHERE e.task_id = ANY (ARRAY[t.id]) AND NOT e.is_open
            )
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

    taken := windlass.take_all_waiting(cancelled, false);
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

CREATE FUNCTION windlass.change_task(changed uuid, new_priority smallint, new_queue text, new_due timestamp with time zone, new_delay double precision) RETURNS boolean
    LANGUAGE plpgsql
    AS $$
DECLARE
    was record;
    at timestamptz;
    lane bigint;
    wanted_kind smallint;
    gate bigint;
BEGIN
    -- Whoever opens the gate goes round it as long as we have it.
    SELECT e.gate INTO gate FROM windlass.gate_entry e WHERE e.task_id = changed AND NOT e.is_open FOR UPDATE;
    IF gate IS NULL AND NOT windlass.take_waiting(changed) THEN
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
    IF gate IS NOT NULL OR EXISTS (SELECT FROM windlass.task_gate k WHERE k.task_id = changed) THEN
        -- At that of its value it does not wait before its time.
        IF gate & 1 = 1 AND was.scheduled_for > at THEN
            DELETE FROM windlass.gate_entry e WHERE e.task_id = changed AND NOT e.is_open;
            gate := NULL;
        END IF;
        IF gate IS NULL THEN
            INSERT INTO windlass.gate_call (gate, due)
            SELECT g.gate, at FROM unnest(windlass.place_gated(ARRAY[changed])) AS g (gate);
            PERFORM windlass.leave_gates(ARRAY[changed], false);  -- that of its value, if its time is ahead now
        END IF;
        PERFORM windlass.wake(false);
        RETURN true;
    END IF;
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

CREATE FUNCTION windlass.change_use(changed_scope text, changed_name text, taken integer, left_tokens double precision, at timestamp with time zone) RETURNS integer
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET jit TO 'off'
    AS $$
DECLARE
    use windlass.limit_use;
BEGIN
    SELECT k.* INTO use
    FROM windlass.limit_use k
    WHERE k.scope = changed_scope AND k.name = changed_name
    ORDER BY k.version DESC
    LIMIT 1;
    IF use.version IS NULL OR use.changes >= 50 THEN
        DELETE FROM windlass.limit_use k
        WHERE k.scope = changed_scope AND k.name = changed_name AND k.version = use.version;
        INSERT INTO windlass.limit_use (scope, name, version, used, tokens, counted_at)
        VALUES (
            changed_scope, changed_name, coalesce(use.version, 0) + 1, greatest(0, coalesce(use.used, 0) + taken),
            coalesce(left_tokens, use.tokens),
            CASE WHEN left_tokens IS NULL THEN coalesce(use.counted_at, at) ELSE at END
        );
    ELSE
        UPDATE windlass.limit_use k
        SET used = greatest(0, k.used + taken), tokens = coalesce(left_tokens, k.tokens),
            counted_at = CASE WHEN left_tokens IS NULL THEN k.counted_at ELSE at END,
            changes = k.changes + 1
        WHERE k.scope = changed_scope AND k.name = changed_name AND k.version = use.version;
    END IF;
    RETURN coalesce(use.used, 0);
END
$$;

CREATE FUNCTION windlass.change_value_rules(changed text[]) RETURNS void
    LANGUAGE plpgsql
    AS $$
BEGIN
    INSERT INTO windlass.value_rule_change (type, changed_at)
    SELECT u.type, windlass.clock() FROM unnest(changed) AS u (type);
    INSERT INTO windlass.gate_call (gate, due)
    SELECT g.gate, windlass.clock() FROM windlass.gate g WHERE g.type = ANY (changed);
    PERFORM windlass.wake(false);
END
$$;

CREATE FUNCTION windlass.check_completion(shown_token uuid, shown_task uuid, shown_generation integer, retention interval, key_retention interval) RETURNS boolean
    LANGUAGE plpgsql
    AS $$
DECLARE
    day text;
BEGIN
    SELECT to_char(
        windlass.drop_day(
            windlass.clock(), t.retention_seconds, retention, t.idempotency_key, key_retention
        )::timestamp,
        'YYYYMMDD'
    )
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
            AND day COLLATE "C" >= split_part(c.relname, '_', 2)
            AND day COLLATE "C" < split_part(c.relname, '_', 3)
    );
END
$$;

CREATE FUNCTION windlass.check_fence(fence jsonb) RETURNS void
    LANGUAGE plpgsql
    AS $$
BEGIN
    IF fence <> 'null' THEN
        IF jsonb_typeof(fence) <> 'object' OR NOT fence ?& '{token,task_id,generation}' THEN
            PERFORM windlass.refuse('WL006',
                format('fence %s: use an object of token, task_id and generation, or leave it out',
                    windlass.shown(fence)));
        END IF;
        PERFORM windlass.checked_id(fence -> 'token', 'token', 'claim');
        PERFORM windlass.checked_id(fence -> 'task_id', 'task_id');
        IF NOT windlass.is_whole(fence -> 'generation', 1, 2147483647) THEN
            PERFORM windlass.refuse('WL006', format('generation %s: use an integer from 1 to 2147483647',
                windlass.shown(fence -> 'generation')));
        END IF;
    END IF;
END
$$;

CREATE FUNCTION windlass.check_payload(type text, payload jsonb, max_bytes integer) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
DECLARE
    fault text;
    named text;
BEGIN
    IF jsonb_typeof(payload) <> 'object' THEN
        PERFORM windlass.refuse('WL005',
            format('task ''%s'': the payload is of type %s; give an object of arguments',
                type, jsonb_typeof(payload)));
    END IF;
    fault := windlass.payload_fault(payload, max_bytes);
    IF fault IS NOT NULL THEN
        SELECT format('argument %s: %s', windlass.shown(to_jsonb(k.key)), k.fault) INTO named
        FROM (
            SELECT a.key, windlass.payload_fault(a.value, max_bytes) AS fault FROM jsonb_each(payload) AS a
        ) k
        WHERE k.fault IS NOT NULL
        LIMIT 1;
        PERFORM windlass.refuse('WL005', format('task ''%s'': %s', type, coalesce(named, fault)));
    END IF;
END
$$;

CREATE FUNCTION windlass.checked_delay(given jsonb) RETURNS double precision
    LANGUAGE plpgsql
    AS $$
BEGIN
    IF given IS NULL THEN
        RETURN NULL;
    END IF;
    IF jsonb_typeof(given) = 'number' THEN
        IF given::numeric BETWEEN 0 AND 3162240000 THEN
            RETURN round(given::numeric, 9);  -- some smaller ones have no place in a float8
        ELSIF given::numeric > 0 THEN
            PERFORM windlass.refuse('WL006',
                format('delay %s: use less than a hundred years', windlass.shown(given)));
        END IF;
    -- What is no number in JSON arrives as a text.
    ELSIF given NOT IN ('"NaN"', '"Infinity"', '"-Infinity"') THEN
        PERFORM windlass.refuse('WL006',
            format('delay %s: use seconds or a timedelta', windlass.shown(given)));
    END IF;
    PERFORM windlass.refuse('WL006',
        format('delay %s: use a finite number of seconds, not below 0', windlass.shown(given)));
END
$$;

CREATE FUNCTION windlass.checked_expiry(given jsonb) RETURNS timestamp with time zone
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $_$
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
$_$;

CREATE FUNCTION windlass.checked_id(given jsonb, what text DEFAULT 'id'::text, whose text DEFAULT 'task'::text) RETURNS uuid
    LANGUAGE plpgsql
    AS $_$
BEGIN
    IF jsonb_typeof(given) <> 'string'
        OR given #>> '{}' !~* '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$' THEN
        PERFORM windlass.refuse('WL006',
            format('%s %s is not the id of a %s; ids are UUIDs', what, windlass.shown(given), whose));
    END IF;
    RETURN given #>> '{}';
END
$_$;

CREATE FUNCTION windlass.checked_limit_by(given jsonb) RETURNS jsonb
    LANGUAGE plpgsql IMMUTABLE
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
BEGIN
    IF given IS NOT NULL AND NOT coalesce(
        jsonb_typeof(given) = 'array' AND jsonb_array_length(given) > 0 AND NOT EXISTS (
            SELECT
            FROM jsonb_array_elements(given) AS e (argument)
            WHERE jsonb_typeof(e.argument) <> 'array' OR jsonb_typeof(e.argument -> 0) IS DISTINCT FROM 'string'
        ), false
    ) THEN
        PERFORM windlass.refuse('WL006', format('limit_by %s: use [[name, default], …]', windlass.shown(given)));
    END IF;
    RETURN given;
END
$$;

CREATE FUNCTION windlass.checked_name(what text, given jsonb) RETURNS text
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
DECLARE
    name constant text := CASE WHEN jsonb_typeof(given) = 'string' THEN given #>> '{}' END;
BEGIN
    IF jsonb_typeof(given) IS DISTINCT FROM 'string' THEN
        PERFORM windlass.refuse('WL006',
            format('%s %s must be a string', what, coalesce(windlass.shown(given), 'null')));
    ELSIF length(name) NOT BETWEEN 1 AND 200 THEN
        PERFORM windlass.refuse('WL006', format('%s %s has %s characters; use 1 to 200',
            what, windlass.quoted(left(name, 40)), length(name)));
    ELSIF name ~ E'[\\u0001-\\u001f\\u007f-\\u009f]' THEN
        PERFORM windlass.refuse('WL006',
            format('%s %s holds a control character; remove it', what, windlass.quoted(name)));
    END IF;
    RETURN name;
END
$$;

CREATE FUNCTION windlass.checked_priority(given jsonb) RETURNS smallint
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
DECLARE
    names constant jsonb := '{"low": 0, "normal": 10, "high": 20, "critical": 30}';
BEGIN
    IF jsonb_typeof(given) = 'string' AND names ? (given #>> '{}') THEN
        RETURN names -> (given #>> '{}');
    END IF;
    IF NOT windlass.is_whole(given, 0, 100) THEN
        PERFORM windlass.refuse('WL006', format(
            'priority %s: use an integer from 0 to 100 or one of low, normal, high, critical',
            windlass.shown(given)));
    END IF;
    RETURN given;
END
$$;

CREATE FUNCTION windlass.checked_time(given jsonb) RETURNS timestamp with time zone
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET "TimeZone" TO 'UTC'
    AS $_$
DECLARE
    form constant text :=
        '^[0-9]{4,}-[0-9]{2}-[0-9]{2}[T ].*(Z|[+-][0-9]{2}(:?[0-9]{2}){0,2})$';
    said constant text := CASE WHEN jsonb_typeof(given) = 'string' THEN given #>> '{}' END;
    at timestamptz;
BEGIN
    IF given IS NULL THEN
        RETURN NULL;
    END IF;
    IF jsonb_typeof(given) = 'string' AND said ~ form THEN
        BEGIN
            at := said::timestamptz;
        EXCEPTION WHEN data_exception THEN
            at := NULL;
        END;
        IF at < '10000-01-01 00:00:00+00' THEN
            RETURN at;
        ELSIF at IS NOT NULL THEN
            PERFORM windlass.refuse('WL006',
                format('at %s is after the year 9999; use an earlier time', windlass.shown(given)));
        END IF;
    END IF;
    PERFORM windlass.refuse('WL006', format(
        'at %s: use a time with a time zone, such as 2030-01-31T12:00:00Z', windlass.shown(given)));
END
$_$;

CREATE FUNCTION windlass.checked_window(item jsonb) RETURNS jsonb
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
DECLARE
    kinds constant text[] := ARRAY(
        SELECT k.kind FROM unnest('{unique_for,throttle,debounce}'::text[]) AS k (kind) WHERE item ? k.kind
    );
    kind constant text := kinds[1];
    given constant jsonb := item -> kind;
    beside text := kinds[2];
    seconds numeric;
BEGIN
    IF kind IS NULL THEN
        IF item ? 'dedupe_key' THEN
            PERFORM windlass.refuse('WL006',
                'option ''dedupe_key'' says what a window is for; give unique_for, throttle or debounce too');
        END IF;
        RETURN NULL;
    END IF;
    IF beside IS NULL THEN
        SELECT o.name INTO beside
        FROM unnest('{idempotency_key,delay,at,ordering_key}'::text[]) WITH ORDINALITY AS o (name, ordinal)
        WHERE item ? o.name AND (kind = 'debounce' OR o.name = 'idempotency_key')
        ORDER BY o.ordinal
        LIMIT 1;
    END IF;
    IF beside IS NOT NULL THEN
        PERFORM windlass.refuse('WL006',
            format('options ''%s'' and ''%s'' exclude each other; give one', kind, beside));
    END IF;
    IF jsonb_typeof(given) = 'number' THEN
        seconds := given;
        IF seconds > 31622400 THEN
            PERFORM windlass.refuse('WL006', format('%s %s: use at most 366 days', kind, windlass.shown(given)));
        END IF;
    -- What is no number in JSON arrives as a text.
    ELSIF given NOT IN ('"NaN"', '"Infinity"', '"-Infinity"') THEN
        PERFORM windlass.refuse('WL006',
            format('%s %s: use seconds or a timedelta', kind, windlass.shown(given)));
    END IF;
    IF seconds > 0 THEN
        RETURN jsonb_build_object(
            'kind', kind,
            'seconds', round(seconds, 9),  -- some smaller ones have no place in a float8
            'key', CASE WHEN item ? 'dedupe_key' THEN windlass.checked_name('dedupe_key', item -> 'dedupe_key') END
        );
    END IF;
    PERFORM windlass.refuse('WL006',
        format('%s %s: use a finite number of seconds, above 0', kind, windlass.shown(given)));
END
$$;

CREATE FUNCTION windlass.claim_batches(worker uuid, new_token uuid, types text[], queues text[], wanted integer, lease interval, ageing interval, alone boolean, lanes bigint[], from_x bigint[], from_n bigint[], late_x bigint[], at_most integer DEFAULT NULL::integer, other_than text[] DEFAULT NULL::text[]) RETURNS TABLE(type text, queue text, priority smallint, ids uuid[], payloads text[], attempts smallint[], max_attempts smallint[], generations integer[], waited double precision[], fence bigint, snapshot text, read_lanes bigint[], last_x bigint[], last_n bigint[], read_to_end boolean[], alone_waiting boolean, due_in double precision, cancelled uuid[], reasons text[], more_in double precision, is_capped boolean, has_calls boolean)
    LANGUAGE plpgsql
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    SET jit TO 'off'
    AS $$
#variable_conflict use_column
DECLARE
    -- Taken before any lane is read: what it calls finished is visible to every read below.
    seen constant pg_snapshot := pg_current_snapshot();
    began constant timestamptz := windlass.clock();
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
    cancelled uuid[];
    reasons text[];
    at timestamptz;
    heads refcursor;
    room integer;
    limits text[] := '{}';
    rooms integer[];
    capped boolean[];
    uses integer[];
    tokens float8[];
    rates float8[];
    bursts float8[];
    counted boolean[];
    counted_at timestamptz[];
    own_limits integer[] := '{}';
    held_limits integer[] := '{}';
    held_from integer[] := '{}';
    held_tasks integer[] := '{}';
    place integer;
    named text;
    refill float8;
BEGIN
    IF EXISTS (SELECT FROM windlass.gate_used) THEN
        -- One that reads from the beginning does so here, too.
        PERFORM windlass.answer_calls(500, cardinality(lanes) = 0);
    END IF;
    IF EXISTS (SELECT FROM windlass.lane_rule) OR EXISTS (SELECT FROM windlass.paused_type) THEN
        SELECT
            coalesce(array_agg(o.scope || ' ' || o.name), '{}'), array_agg(least(o.room, o.most)),
            array_agg(o.room > o.most), array_agg(0), array_agg(o.tokens), array_agg(o.rate), array_agg(o.burst),
            array_agg(o.is_counted), array_agg(o.counted_at)
        INTO limits, rooms, capped, uses, tokens, rates, bursts, counted, counted_at
        FROM (
            -- What waits in this worker would be taken from the others, if a limit has little left.
            SELECT l.*, CASE WHEN l.is_counted THEN at_most + greatest(0, l.room / 4 - at_most) END AS most
            FROM windlass.open_limits(types, queues, lanes, from_x, from_n, cardinality(late) > 0, other_than) l
        ) o;
        OPEN heads FOR
        SELECT
            r.lane, r.type, r.queue, r.priority, r.kind, r.x, r.n, r.ready_at, r.limits
        FROM windlass.ruled_heads(types, queues, ageing, lanes, from_x, from_n, late, other_than) r;
    ELSE
        OPEN heads FOR
        SELECT
            l.lane, l.type, l.queue, l.priority, l.kind,
            coalesce(b.x, 0)::text::xid8 AS x, coalesce(b.n, -1) AS n,
            least(h.ready_at, o.ready_at) AS ready_at, '{}'::text[] AS limits
        FROM (
            SELECT DISTINCT k.type, k.queue, k.priority, k.kind, k.lane
            FROM windlass.lane k
            WHERE k.type = ANY (types) AND (queues IS NULL OR k.queue = ANY (queues))
                AND (other_than IS NULL OR k.queue <> ALL (other_than))
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
            l.priority DESC, l.queue COLLATE "C", l.type COLLATE "C", l.kind DESC;
    END IF;
    LOOP
        FETCH heads INTO head;
        EXIT WHEN NOT FOUND;
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
        room := wanted - taken;
        own_limits := '{}';
        FOREACH named IN ARRAY head.limits LOOP
            place := array_position(limits, named);
            own_limits := own_limits || place;
            -- One that was not asked had no tasks when the others were: they come with the next claim.
            room := least(room, coalesce(rooms[place], 0));
        END LOOP;
        -- First what lies behind, by its transaction; then what lies ahead.
        FOREACH passed IN ARRAY late || NULL::xid8 LOOP
            CONTINUE WHEN passed >= head.x;
            EXIT WHEN room <= 0;
            after_x := coalesce(passed, head.x);
            after_n := CASE WHEN passed IS NULL THEN head.n ELSE -1 END;
            until_x := coalesce(passed, '18446744073709551615');
            WITH found AS MATERIALIZED (
                SELECT r.ctid AS place
                FROM windlass.ready r
                WHERE r.lane = head.lane AND (r.x, r.n) > (after_x, after_n) AND r.x <= until_x
                ORDER BY r.x, r.n
                LIMIT room
                FOR UPDATE SKIP LOCKED
            ), gone AS (
                DELETE FROM windlass.ready r
                WHERE r.ctid = ANY (ARRAY(SELECT f.place FROM found f))
                RETURNING r.task_id, r.x, r.n
            )
            SELECT
                array_agg(t.id) AS ids,
                array_agg(coalesce(t.payload::text, (
                    SELECT l.payload FROM windlass.large_payload l WHERE l.task_id = t.id
                ))) AS payloads,
                array_agg(t.attempts) AS attempts, array_agg(t.max_attempts) AS max_attempts,
                array_agg(t.generation) AS generations,
                array_agg(date_part('epoch', began - t.scheduled_for)) AS waited,
                max(g.x) AS x, (array_agg(g.n))[count(*)] AS n, count(*)::integer AS tasks
            INTO batch
            FROM (SELECT o.task_id, o.x, o.n FROM gone o ORDER BY o.x, o.n) g
            -- Not to be taken apart: so the tasks come in the order of their lane.
            CROSS JOIN LATERAL (SELECT k.* FROM windlass.task k WHERE k.id = g.task_id OFFSET 0) t;

            IF passed IS NULL THEN
                end_x := batch.x::text::bigint;
                end_n := batch.n;
                ended := batch.tasks < room;
            END IF;
            CONTINUE WHEN batch.tasks = 0;
            ids := ids || batch.ids;
            generations := generations || batch.generations;
            taken := taken + batch.tasks;
            room := room - batch.tasks;
            FOREACH place IN ARRAY own_limits LOOP
                rooms[place] := rooms[place] - batch.tasks;
                uses[place] := uses[place] + batch.tasks;
                IF counted[place] THEN
                    held_limits := held_limits || place;
                    held_from := held_from || taken - batch.tasks + 1;
                    held_tasks := held_tasks || batch.tasks;
                END IF;
            END LOOP;
            RETURN QUERY SELECT
                head.type, head.queue, head.priority, batch.ids, batch.payloads, batch.attempts,
                batch.max_attempts, batch.generations, batch.waited,
                NULL::bigint, NULL::text, NULL::bigint[], NULL::bigint[], NULL::bigint[],
                NULL::boolean[], NULL::boolean, NULL::float8, NULL::uuid[], NULL::text[], NULL::float8,
                NULL::boolean, NULL::boolean;
        END LOOP;
        all_lanes := all_lanes || head.lane;
        all_x := all_x || end_x;
        all_n := all_n || end_n;
        all_ends := all_ends || ended;
    END LOOP;
    CLOSE heads;

    IF cardinality(held_limits) > 0 THEN
        INSERT INTO windlass.claim_limit (token, scope, name, task_ids, remaining)
        SELECT new_token, split_part(limits[u.place], ' ', 1),
            substr(limits[u.place], strpos(limits[u.place], ' ') + 1),
            CASE WHEN u.tasks < taken THEN ids[u.first : u.first + u.tasks - 1] END, u.tasks
        FROM unnest(held_limits, held_from, held_tasks) AS u (place, first, tasks);
    END IF;

    is_capped := false;
    FOR place IN 1 .. cardinality(limits) LOOP
        IF uses[place] > 0 THEN
            PERFORM windlass.change_use(
                split_part(limits[place], ' ', 1), substr(limits[place], strpos(limits[place], ' ') + 1),
                CASE WHEN counted[place] THEN uses[place] ELSE 0 END,
                tokens[place] - uses[place], counted_at[place]
            );
        END IF;
        is_capped := is_capped OR coalesce(capped[place] AND rooms[place] <= 0, false);
        -- What comes within a twentieth of a second is worth one look.
        refill := greatest(1, least(bursts[place], rates[place] / 20)) - (tokens[place] - uses[place]);
        IF rates[place] IS NOT NULL AND tokens[place] - uses[place] < 1 THEN
            more_in := least(more_in, refill / rates[place]);
        END IF;
    END LOOP;

    IF taken > 0 THEN
        at := windlass.clock();
        INSERT INTO windlass.claim (token, worker_id, claimed_at, expires_at, remaining)
        VALUES (new_token, worker, at, at + lease, taken)
        RETURNING windlass.claim.fence INTO granted;
        INSERT INTO windlass.claim_task (token, task_ids, generations)
        VALUES (new_token, ids, generations);
    END IF;

    IF taken > 0 AND EXISTS (SELECT FROM windlass.cancel_request) THEN
        SELECT array_agg(q.task_id), array_agg(q.reason) INTO cancelled, reasons
        FROM windlass.cancel_request q
        WHERE q.task_id = ANY (ids);
    END IF;

    RETURN QUERY SELECT
        NULL::text, NULL::text, NULL::smallint, NULL::uuid[], NULL::text[], NULL::smallint[],
        NULL::smallint[], NULL::integer[], NULL::float8[],
        granted, seen::text, all_lanes, all_x, all_n, all_ends, suspects,
        -- What is later than two seconds is the leader's: from the beginning of the index every
        -- promoted task that an old snapshot keeps would be walked over.
        (
            SELECT date_part('epoch', least(
                (SELECT min(s.due) FROM windlass.scheduled s WHERE s.due > w.since),
                (SELECT min(c.due) FROM windlass.gate_call c WHERE c.due > w.since)
            ) - windlass.clock())
            FROM (SELECT windlass.clock() - interval '2 seconds' AS since OFFSET 0) w
        ),
        cancelled, reasons, more_in, is_capped,
        -- Gates are never locked again once limits are, nor lower ones: the caller answers these by itself.
        taken = 0 AND EXISTS (SELECT FROM windlass.gate_used) AND EXISTS (
            SELECT FROM windlass.gate_call c WHERE c.due <= (SELECT windlass.clock() OFFSET 0)
        );
END
$$;

CREATE FUNCTION windlass.claim_lane(worker uuid, new_token uuid, types text[], queues text[], wanted integer, lease interval, named_lane bigint, from_x bigint, from_n bigint) RETURNS TABLE(type text, queue text, priority smallint, ids uuid[], payloads text[], attempts smallint[], max_attempts smallint[], generations integer[], waited double precision[], fence bigint, snapshot text, read_lanes bigint[], last_x bigint[], last_n bigint[], read_to_end boolean[], alone_waiting boolean, due_in double precision, cancelled uuid[], reasons text[])
    LANGUAGE plpgsql
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    SET jit TO 'off'
    AS $$
#variable_conflict use_column
DECLARE
    -- Taken before the lane is read, as in claim_batches.
    seen constant pg_snapshot := pg_current_snapshot();
    began constant timestamptz := windlass.clock();
    after_x constant xid8 := coalesce(from_x, 0)::text::xid8;
    after_n constant bigint := coalesce(from_n, -1);
    batch record;
BEGIN
    SELECT l.type, l.queue, l.priority INTO type, queue, priority
    FROM windlass.lane l
    WHERE l.lane = named_lane AND l.kind < 2
        AND l.type = ANY (types) AND (queues IS NULL OR l.queue = ANY (queues))
        AND NOT EXISTS (
            SELECT FROM windlass.queue q WHERE q.name = l.queue AND q.paused_at IS NOT NULL
        )
    LIMIT 1;
    snapshot := seen::text;
    alone_waiting := false;
    IF NOT FOUND THEN
        read_lanes := '{}'; last_x := '{}'; last_n := '{}'; read_to_end := '{}';
        RETURN NEXT;
        RETURN;
    END IF;
    IF (EXISTS (SELECT FROM windlass.lane_rule) OR EXISTS (SELECT FROM windlass.paused_type))
        AND windlass.is_limited(queue, type)
    THEN
        type := NULL; queue := NULL; priority := NULL; alone_waiting := NULL;
        read_lanes := '{}'; last_x := '{}'; last_n := '{}'; read_to_end := '{}';
        RETURN NEXT;
        RETURN;
    END IF;

    WITH found AS MATERIALIZED (
        SELECT r.ctid AS place
        FROM windlass.ready r
        WHERE r.lane = named_lane AND (r.x, r.n) > (after_x, after_n)
        ORDER BY r.x, r.n
        LIMIT wanted
        FOR UPDATE SKIP LOCKED
    ), gone AS (
        DELETE FROM windlass.ready r
        WHERE r.ctid = ANY (ARRAY(SELECT f.place FROM found f))
        RETURNING r.task_id, r.x, r.n
    ), taken AS MATERIALIZED (
        SELECT
            array_agg(t.id) AS ids,
            array_agg(coalesce(t.payload::text, (
                SELECT l.payload FROM windlass.large_payload l WHERE l.task_id = t.id
            ))) AS payloads,
            array_agg(t.attempts) AS attempts, array_agg(t.max_attempts) AS max_attempts,
            array_agg(t.generation) AS generations,
            array_agg(date_part('epoch', began - t.scheduled_for)) AS waited,
            max(g.x) AS x, (array_agg(g.n))[count(*)] AS n, count(*)::integer AS tasks
        FROM (SELECT o.task_id, o.x, o.n FROM gone o ORDER BY o.x, o.n) g
        -- Not to be taken apart: so the tasks come in the order of their lane.
        CROSS JOIN LATERAL (SELECT k.* FROM windlass.task k WHERE k.id = g.task_id OFFSET 0) t
    ), granted AS (
        INSERT INTO windlass.claim (token, worker_id, claimed_at, expires_at, remaining)
        SELECT new_token, worker, n.at, n.at + lease, k.tasks
        FROM taken k, (SELECT windlass.clock() AS at OFFSET 0) n
        WHERE k.tasks > 0
        RETURNING windlass.claim.fence
    ), listed AS (
        INSERT INTO windlass.claim_task (token, task_ids, generations)
        SELECT new_token, k.ids, k.generations FROM taken k WHERE k.tasks > 0
    )
    SELECT k.*, (SELECT g.fence FROM granted g) AS fence INTO batch FROM taken k;

    ids := batch.ids; payloads := batch.payloads; attempts := batch.attempts;
    max_attempts := batch.max_attempts; generations := batch.generations; waited := batch.waited;
    fence := batch.fence;
    read_lanes := ARRAY[named_lane];
    last_x := ARRAY[batch.x::text::bigint];
    last_n := ARRAY[batch.n];
    read_to_end := ARRAY[batch.tasks < wanted];
    IF batch.tasks > 0 AND EXISTS (SELECT FROM windlass.cancel_request) THEN
        SELECT array_agg(q.task_id), array_agg(q.reason) INTO cancelled, reasons
        FROM windlass.cancel_request q
        WHERE q.task_id = ANY (batch.ids);
    END IF;
    RETURN NEXT;
END
$$;

CREATE FUNCTION windlass.claim_one(worker uuid, new_token uuid, types text[], queues text[], lease interval, named_lane bigint, named uuid, from_x bigint, from_n bigint) RETURNS TABLE(type text, queue text, priority smallint, payload text, attempts smallint, max_attempts smallint, waited double precision, fence bigint, is_behind boolean)
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    SET jit TO 'off'
    AS $$
#variable_conflict use_column
DECLARE
    after_x constant xid8 := coalesce(from_x, 0)::text::xid8;
    after_n constant bigint := coalesce(from_n, -1);
    is_ruled constant boolean :=
        EXISTS (SELECT FROM windlass.lane_rule) OR EXISTS (SELECT FROM windlass.paused_type);
    at timestamptz;
BEGIN
    -- The row of its place is never changed, only removed: who has locked it knows all of the task.
    -- It is to be found by its id, for which with IS TRUE the index of lanes is of no use. And what is before it
    -- by that index: OFFSET 0 keeps it from being joined in some other way.
    SELECT
        t.type, t.queue, t.priority,
        coalesce(t.payload::text, (SELECT l.payload FROM windlass.large_payload l WHERE l.task_id = t.id)),
        t.attempts, t.max_attempts, date_part('epoch', windlass.clock() - t.scheduled_for)
    INTO type, queue, priority, payload, attempts, max_attempts, waited
    FROM windlass.ready r
    JOIN windlass.task t ON t.id = r.task_id
    WHERE r.task_id = named AND (r.lane = named_lane) IS TRUE AND r.generation = 1
        AND t.type = ANY (types) AND (queues IS NULL OR t.queue = ANY (queues))
        AND NOT EXISTS (
            SELECT FROM windlass.queue q WHERE q.name = t.queue AND q.paused_at IS NOT NULL
        )
        AND NOT (is_ruled AND windlass.is_limited(t.queue, t.type))
        AND NOT EXISTS (
            SELECT
            FROM windlass.ready o
            WHERE o.lane = named_lane AND (o.x, o.n) > (after_x, after_n) AND (o.x, o.n) < (r.x, r.n)
            OFFSET 0
        )
    FOR UPDATE OF r SKIP LOCKED;
    IF NOT FOUND THEN
        is_behind := EXISTS (
            SELECT
            FROM windlass.ready r
            WHERE r.task_id = named AND (r.lane = named_lane) IS TRUE
                AND (is_ruled OR EXISTS (
                    SELECT
                    FROM windlass.ready o
                    WHERE o.lane = named_lane AND (o.x, o.n) > (after_x, after_n) AND (o.x, o.n) < (r.x, r.n)
                    OFFSET 0
                ))
        );
        RETURN NEXT;
        RETURN;
    END IF;
    DELETE FROM windlass.ready r WHERE r.task_id = named;
    at := windlass.clock();
    INSERT INTO windlass.claim (token, worker_id, claimed_at, expires_at, remaining)
    VALUES (new_token, worker, at, at + lease, 1)
    RETURNING windlass.claim.fence INTO fence;
    INSERT INTO windlass.claim_task (token, task_ids, generations)
    VALUES (new_token, ARRAY[named], ARRAY[1]);
    RETURN NEXT;
END
$$;

CREATE FUNCTION windlass.claim_tasks(worker uuid, new_token uuid, types text[], queues text[], wanted integer, lease interval, ageing interval, alone boolean, lanes bigint[], from_x bigint[], from_n bigint[], late_x bigint[]) RETURNS TABLE(id uuid, type text, queue text, priority smallint, payload jsonb, attempts smallint, max_attempts smallint, generation integer, cancel_reason text, fence bigint, snapshot text, read_lanes bigint[], last_x bigint[], last_n bigint[], read_to_end boolean[], alone_waiting boolean, due_in double precision, waited double precision)
    LANGUAGE sql
    AS $$
SELECT
    u.id, b.type, b.queue, b.priority, u.payload::jsonb, u.attempts, u.max_attempts, u.generation,
    (SELECT q.reason FROM windlass.cancel_request q WHERE q.task_id = u.id),
    b.fence, b.snapshot, b.read_lanes, b.last_x, b.last_n, b.read_to_end, b.alone_waiting, b.due_in,
    u.waited
FROM windlass.claim_batches(
    worker, new_token, types, queues, wanted, lease, ageing, alone, lanes, from_x, from_n, late_x
) WITH ORDINALITY AS b (
    type, queue, priority, ids, payloads, attempts, max_attempts, generations, waited, fence, snapshot,
    read_lanes, last_x, last_n, read_to_end, alone_waiting, due_in, cancelled, reasons, place
)
LEFT JOIN LATERAL unnest(
    b.ids, b.payloads, b.attempts, b.max_attempts, b.generations, b.waited
) WITH ORDINALITY AS u (id, payload, attempts, max_attempts, generation, waited, ordinal) ON true
ORDER BY b.snapshot IS NULL, b.place, u.ordinal
$$;

CREATE FUNCTION windlass.clock() RETURNS timestamp with time zone
    LANGUAGE sql PARALLEL SAFE
    AS $$SELECT clock_timestamp()$$;

CREATE FUNCTION windlass.compact_bytes(payload jsonb) RETURNS bigint
    LANGUAGE sql IMMUTABLE
    AS $_$
SELECT octet_length(payload::text) - coalesce(sum(
    CASE jsonb_typeof(part)
        WHEN 'array' THEN greatest(jsonb_array_length(part) - 1, 0)
        WHEN 'object' THEN (SELECT greatest(2 * count(*) - 1, 0) FROM jsonb_object_keys(part))
        ELSE 0
    END
), 0)
FROM jsonb_path_query(payload, 'strict $.**') AS q (part)
$_$;

CREATE FUNCTION windlass.complete_and_call(shown_token uuid, shown_task uuid, shown_generation integer, started_after double precision, result text, retention interval, key_retention interval) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
BEGIN
    PERFORM windlass.complete_task(
        shown_token, shown_task, shown_generation, started_after, result, retention, key_retention);
    PERFORM windlass.call_back(ARRAY[shown_task]);
END
$$;

CREATE FUNCTION windlass.complete_batch(held uuid[], workers uuid[], claim_times timestamp with time zone[], which smallint[], task_ids uuid[], generations integer[], started_after double precision[], outcomes text[], results text[], reported boolean[], at timestamp with time zone, usual_day date, retention interval, key_retention interval) RETURNS bigint[]
    LANGUAGE plpgsql
    SET enable_nestloop TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'on'
    SET enable_sort TO 'on'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    SET jit TO 'off'
    AS $$
#variable_conflict use_column
DECLARE
    settled bigint[];
BEGIN
    WITH ended AS (
        DELETE FROM windlass.task t
        -- Results are not among what is sorted: they may be large.
        USING unnest(task_ids) WITH ORDINALITY AS u (task_id, ordinal)
        WHERE t.id = ANY (task_ids) AND t.id = u.task_id
            AND t.generation = 1 AND generations[u.ordinal] = 1
            AND held[which[u.ordinal]] IS NOT NULL
            AND (outcomes IS NULL OR outcomes[u.ordinal] = 'completed')
            AND (reported IS NULL OR NOT reported[u.ordinal])
        RETURNING
            t.id, t.type, t.queue, t.priority, t.max_attempts, t.attempts, t.generation,
            t.retention_seconds, t.created_at, t.scheduled_for, t.idempotency_key, t.payload, t.tags,
            u.ordinal
    ), kept AS (
        INSERT INTO windlass.history (
            id, type, queue, status, priority, max_attempts, attempts, generation,
            retention_seconds, drop_on, created_at, scheduled_for, claimed_at, started_at,
            completed_at, worker_id, token, idempotency_key, payload, tags, result
        )
        SELECT
            e.id, e.type, e.queue, 'completed', e.priority, e.max_attempts, e.attempts + 1, e.generation,
            e.retention_seconds,
            CASE WHEN e.retention_seconds IS NULL AND e.idempotency_key IS NULL THEN usual_day
                ELSE windlass.drop_day(at, e.retention_seconds, retention, e.idempotency_key, key_retention)
            END,
            e.created_at, e.scheduled_for, claim_times[which[e.ordinal]],
            claim_times[which[e.ordinal]] + started_after[e.ordinal] * interval '1 second', at,
            workers[which[e.ordinal]], held[which[e.ordinal]], e.idempotency_key, e.payload, e.tags,
            results[e.ordinal]::jsonb
        FROM ended e
    )
    SELECT coalesce(array_agg(e.ordinal), '{}') INTO settled FROM ended e;
    RETURN settled;
END
$$;

CREATE FUNCTION windlass.complete_task(shown_token uuid, shown_task uuid, shown_generation integer, started_after double precision, result text, retention interval, key_retention interval) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
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
    EXECUTE format(
        'DELETE FROM windlass.task_tag k USING (SELECT h.id, unnest(h.tags) AS tag FROM %I.%I h) g '
        'WHERE k.tag = g.tag AND k.task_id = g.id', home, name);
    EXECUTE format(
        'DELETE FROM windlass.large_payload l USING %I.%I h '
        'WHERE h.payload IS NULL AND l.task_id = h.id', home, name);
    EXECUTE format(
        'SELECT windlass.forget_lineage(ARRAY('
        'SELECT h.id FROM windlass.replay r JOIN %I.%I h ON h.id = r.task_id '
        'UNION SELECT h.id FROM windlass.replay r JOIN %I.%I h ON h.id = r.ancestor))',
        home, name, home, name);
    IF EXISTS (SELECT FROM windlass.gate_used) THEN
        EXECUTE format('DELETE FROM windlass.task_gate k USING %I.%I h WHERE k.task_id = h.id', home, name);
    END IF;
    EXECUTE format('DROP TABLE %I.%I', home, name);
END
$$;

CREATE FUNCTION windlass.end_cancelled(ended uuid[], why text, retention interval, key_retention interval) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET enable_material TO 'off'
    SET jit TO 'off'
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
    PERFORM windlass.call_gates(ended);
END
$$;

CREATE FUNCTION windlass.enqueue(type text, payload jsonb DEFAULT '{}'::jsonb, queue text DEFAULT NULL::text, priority integer DEFAULT NULL::integer, delay double precision DEFAULT NULL::double precision, at timestamp with time zone DEFAULT NULL::timestamp with time zone, idempotency_key text DEFAULT NULL::text, max_attempts integer DEFAULT NULL::integer, tags text[] DEFAULT NULL::text[], expires timestamp with time zone DEFAULT NULL::timestamp with time zone, ordering_key text DEFAULT NULL::text, on_dead text DEFAULT NULL::text, unique_for double precision DEFAULT NULL::double precision, throttle double precision DEFAULT NULL::double precision, debounce double precision DEFAULT NULL::double precision, dedupe_key text DEFAULT NULL::text) RETURNS uuid
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    SET jit TO 'off'
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
        AND ordering_key IS NULL AND on_dead IS NULL
        AND unique_for IS NULL AND throttle IS NULL AND debounce IS NULL AND dedupe_key IS NULL
        AND length(type) BETWEEN 1 AND 200 AND type !~ control
        AND coalesce(length(queue) BETWEEN 1 AND 200 AND queue !~ control, true)
        AND coalesce(priority BETWEEN 0 AND 100, true)
        AND coalesce(max_attempts BETWEEN 1 AND 30000, true)
        AND jsonb_typeof(payload) = 'object'
        AND pg_column_size(payload) < 1000  -- the text of a longer one could be of gigabytes
    THEN
        SELECT s.max_payload_bytes, t.queue, t.priority, t.max_attempts, t.retention_seconds, t.limit_by INTO known
        FROM windlass.setting s
        LEFT JOIN windlass.task_type t ON t.name = type
        WHERE s.only_row;
        -- What is in a payload of less than 300 bytes is neither too deep nor too long.
        IF octet_length(payload::text) <= least(299, known.max_payload_bytes) AND known.limit_by IS NULL THEN
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
        type, payload, queue, priority, delay, at, idempotency_key, max_attempts, tags, expires,
        ordering_key, on_dead, unique_for, throttle, debounce, dedupe_key);
END
$$;

CREATE FUNCTION windlass.enqueue_alike(task_ids uuid[], payloads text[], type text, queue text, priority smallint, max_attempts smallint, retention integer) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
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

CREATE FUNCTION windlass.enqueue_checked(type text, payload jsonb, queue text, priority integer, delay double precision, at timestamp with time zone, idempotency_key text, max_attempts integer, tags text[], expires timestamp with time zone, ordering_key text, on_dead text, unique_for double precision, throttle double precision, debounce double precision, dedupe_key text) RETURNS uuid
    LANGUAGE sql
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET extra_float_digits TO '1'
    SET "TimeZone" TO 'UTC'
    AS $$
SELECT windlass.enqueue_many(jsonb_build_array(jsonb_build_object(
    'type', type, 'payload', payload, 'queue', queue, 'priority', priority, 'delay', delay,
    -- What is past means now, also before our era, which a text says in another way.
    'at', CASE WHEN at < '0001-01-02 00:00:00+00' THEN '0001-01-02 00:00:00+00' ELSE at END,
    'expires', CASE WHEN expires < '0001-01-02 00:00:00+00' THEN '0001-01-02 00:00:00+00' ELSE expires END,
    'idempotency_key', idempotency_key,
    'max_attempts', max_attempts, 'tags', tags, 'ordering_key', ordering_key, 'on_dead', on_dead,
    'unique_for', unique_for, 'throttle', throttle, 'debounce', debounce, 'dedupe_key', dedupe_key
)))
$$;

CREATE FUNCTION windlass.enqueue_expiring(task_ids uuid[], types text[], queues text[], priorities smallint[], payloads text[], max_attempts smallint[], delays double precision[], due_times timestamp with time zone[], keys text[], tag_lists text[], retentions integer[], fence_token uuid, fence_task uuid, fence_generation integer, repeated boolean, caller_commits boolean, expiries timestamp with time zone[], expiry_delays double precision[], ordering_keys text[] DEFAULT NULL::text[], keeps_keys boolean[] DEFAULT NULL::boolean[], limit_bys text[] DEFAULT NULL::text[]) RETURNS TABLE(ordinal integer, task_id uuid)
    LANGUAGE plpgsql
    AS $$
DECLARE
    at timestamptz;
BEGIN
    RETURN QUERY SELECT k.ordinal, k.task_id FROM windlass.enqueue_tasks(
        task_ids, types, queues, priorities, payloads, max_attempts, delays, due_times, keys, tag_lists,
        retentions, fence_token, fence_task, fence_generation, repeated, caller_commits, false,
        ordering_keys, keeps_keys, limit_bys
    ) k;
    at := windlass.clock();
    PERFORM windlass.let_expire(task_ids, ARRAY(
        SELECT coalesce(u.expiry, at + u.delay * interval '1 second')
        FROM unnest(task_ids, expiries, expiry_delays) WITH ORDINALITY AS u (id, expiry, delay, ordinal)
        ORDER BY u.ordinal
    ));
END
$$;

CREATE FUNCTION windlass.enqueue_many(tasks jsonb, fence jsonb DEFAULT NULL::jsonb) RETURNS SETOF uuid
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
#variable_conflict use_variable
DECLARE
    known_options constant text[] :=
        '{id,type,payload,queue,priority,delay,at,expires,idempotency_key,ordering_key,on_dead,max_attempts,tags,retention,unique_for,throttle,debounce,dedupe_key}';
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
    ordering_keys text[] := '{}';
    keeps_keys boolean[] := '{}';
    limit_bys text[] := '{}';
    opened jsonb;
    window_kinds text[] := '{}';
    window_keys text[] := '{}';
    window_seconds float8[] := '{}';
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
        limit_bys := array_fill(known.limit_by::text, ARRAY[cardinality(ids)]);
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
            WHERE o.key <> ALL (known_options || 'limit_by'::text) LIMIT 1;  -- which our own clients give
            IF FOUND THEN
                PERFORM windlass.refuse('WL006', format('option %s is not known; options are: %s',
                    windlass.shown(to_jsonb(unknown)), array_to_string(known_options, ', ')));
            END IF;
            name := windlass.checked_name('task name', item -> 'type');
            SELECT * INTO known FROM windlass.task_type t WHERE t.name = name;
            payload := coalesce(item -> 'payload', '{}');
            PERFORM windlass.check_payload(name, payload, settings.max_payload_bytes);
            IF item ? 'on_dead' AND item -> 'on_dead' NOT IN ('"hold"', '"pass"') THEN
                PERFORM windlass.refuse('WL006', format('on_dead %s: use "hold" or "pass"',
                    windlass.shown(item -> 'on_dead')));
            ELSIF item ? 'on_dead' AND NOT item ? 'ordering_key' THEN
                PERFORM windlass.refuse('WL006',
                    'option ''on_dead'' says what becomes of an ordering key; give ordering_key too');
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
            ordering_keys := ordering_keys || CASE WHEN item ? 'ordering_key'
                THEN windlass.checked_name('ordering_key', item -> 'ordering_key') END;
            keeps_keys := keeps_keys || coalesce(item ->> 'on_dead' = 'hold', false);
            limit_bys := limit_bys || windlass.checked_limit_by(coalesce(item -> 'limit_by', known.limit_by))::text;
            opened := windlass.checked_window(item);
            window_kinds := window_kinds || (opened ->> 'kind');
            window_keys := window_keys || (opened ->> 'key');
            window_seconds := window_seconds || (opened -> 'seconds')::float8;
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
    IF array_remove(window_kinds, NULL) <> '{}' THEN
        RETURN QUERY
        SELECT coalesce(k.task_id, u.id)
        FROM unnest(ids) WITH ORDINALITY AS u (id, ordinal)
        LEFT JOIN windlass.enqueue_windowed(
            ids, types, queues, priorities, payloads, attempts, delays, times,
            CASE WHEN array_remove(keys, NULL) <> '{}' THEN keys END,
            tag_lists, retentions,
            (fence ->> 'token')::uuid, (fence ->> 'task_id')::uuid, (fence ->> 'generation')::integer,
            false, true, expiries, NULL,
            CASE WHEN array_remove(ordering_keys, NULL) <> '{}' THEN ordering_keys END, keeps_keys,
            CASE WHEN array_remove(limit_bys, NULL) <> '{}' THEN limit_bys END,
            window_kinds, window_keys, window_seconds, numbered
        ) AS k ON k.ordinal = u.ordinal - 1
        ORDER BY u.ordinal;
    ELSE
        RETURN QUERY
        SELECT coalesce(k.task_id, u.id)
        FROM unnest(ids) WITH ORDINALITY AS u (id, ordinal)
        LEFT JOIN windlass.enqueue_tasks(
            ids, types, queues, priorities, payloads, attempts, delays, times,
            CASE WHEN array_remove(keys, NULL) <> '{}' THEN keys END,
            tag_lists, retentions,
            (fence ->> 'token')::uuid, (fence ->> 'task_id')::uuid, (fence ->> 'generation')::integer,
            false, true, numbered,
            CASE WHEN array_remove(ordering_keys, NULL) <> '{}' THEN ordering_keys END, keeps_keys,
            CASE WHEN array_remove(limit_bys, NULL) <> '{}' THEN limit_bys END
        ) AS k ON k.ordinal = u.ordinal - 1
        ORDER BY u.ordinal;
        IF array_remove(expiries, NULL) <> '{}' THEN
            PERFORM windlass.let_expire(ids, expiries);
        END IF;
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

CREATE PROCEDURE windlass.enqueue_now(IN task_id uuid, IN payload text, IN type text, IN queue text, IN priority smallint, IN max_attempts smallint, IN retention integer)
    LANGUAGE plpgsql
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
        PERFORM
            pg_catalog.pg_notify('windlass.wake', number || ' ' || task_id),
            pg_catalog.set_config('synchronous_commit', 'off', true);
        COMMIT;
        -- One that writes nothing to the log would not wait for it.
        PERFORM pg_catalog.pg_logical_emit_message(true, 'windlass', '');
    END IF;
END
$$;

CREATE FUNCTION windlass.enqueue_one(task_id uuid, payload text, type text, queue text, priority smallint, max_attempts smallint, retention integer) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
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

CREATE FUNCTION windlass.enqueue_tasks(task_ids uuid[], types text[], queues text[], priorities smallint[], payloads text[], max_attempts smallint[], delays double precision[], due_times timestamp with time zone[], keys text[], tag_lists text[], retentions integer[], fence_token uuid, fence_task uuid, fence_generation integer, repeated boolean, caller_commits boolean, numbered boolean DEFAULT false, ordering_keys text[] DEFAULT NULL::text[], keeps_keys boolean[] DEFAULT NULL::boolean[], limit_bys text[] DEFAULT NULL::text[]) RETURNS TABLE(ordinal integer, task_id uuid)
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET enable_material TO 'off'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    SET jit TO 'off'
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
    gated bigint[] := '{}';  -- places in the call
    keyed bigint[] := '{}';  -- of those that have an ordering key
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

    IF ordering_keys IS NOT NULL OR limit_bys IS NOT NULL THEN
        gated := ARRAY(
            SELECT u.ordinal
            FROM unnest(task_ids, ordering_keys, limit_bys) WITH ORDINALITY AS u (id, ordering_key, limit_by, ordinal)
            WHERE (u.ordering_key IS NOT NULL OR u.limit_by IS NOT NULL) AND u.ordinal <> ALL (known)
            ORDER BY u.ordinal
        );
        keyed := ARRAY(SELECT g.ordinal FROM unnest(gated) AS g (ordinal) WHERE ordering_keys[g.ordinal] IS NOT NULL);
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
        WHERE a.due > born AND a.ordinal <> ALL (keyed)
    )
    INSERT INTO windlass.ready (lane, task_id, generation, ready_at)
    SELECT a.lane, a.id, 1, a.due
    FROM asked a
    WHERE a.due <= born AND a.ordinal <> ALL (gated)
    ORDER BY a.ordinal;
    IF gated <> '{}' THEN
        PERFORM windlass.enter_gates(
            array_agg(task_ids[g.ordinal] ORDER BY g.ordinal), array_agg(types[g.ordinal] ORDER BY g.ordinal),
            array_agg(payloads[g.ordinal] ORDER BY g.ordinal), array_agg(ordering_keys[g.ordinal] ORDER BY g.ordinal),
            array_agg(keeps_keys[g.ordinal] ORDER BY g.ordinal), array_agg(limit_bys[g.ordinal] ORDER BY g.ordinal),
            array_agg(coalesce(
                coalesce(due_times[g.ordinal], born + delays[g.ordinal] * interval '1 second') > born, false
            ) ORDER BY g.ordinal)
        )
        FROM unnest(gated) AS g (ordinal);
    END IF;

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
            WHEN cardinality(task_ids) = 1 AND delays IS NULL AND due_times IS NULL AND gated = '{}'
                THEN windlass.lane_number(queues[1], types[1], priorities[1], 0::smallint)::text
            ELSE ''
        END);
    END IF;
    RETURN QUERY SELECT k.ordinal - 1, k.id FROM unnest(known, known_ids) AS k (ordinal, id);
END
$$;

CREATE FUNCTION windlass.enqueue_windowed(task_ids uuid[], types text[], queues text[], priorities smallint[], payloads text[], max_attempts smallint[], delays double precision[], due_times timestamp with time zone[], keys text[], tag_lists text[], retentions integer[], fence_token uuid, fence_task uuid, fence_generation integer, repeated boolean, caller_commits boolean, expiries timestamp with time zone[], expiry_delays double precision[], ordering_keys text[], keeps_keys boolean[], limit_bys text[], window_kinds text[], window_keys text[], window_seconds double precision[], numbered boolean DEFAULT false) RETURNS TABLE(ordinal integer, task_id uuid)
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
#variable_conflict use_column
DECLARE
    whole_keys text[];  -- of each task
    opened text[];  -- types and keys of the windows, each once
    opened_keys text[];
    firsts integer[];  -- places in the call
    lasts integer[];
    named uuid[];
    known uuid[] := '{}';
    undecided integer[];  -- places among the windows
    moved integer[];
    found integer[];  -- places in the call of what is not added
    found_ids uuid[];
    kept integer[];
    one integer;
    said text;
    place text;
    way_out text;
BEGIN
    whole_keys := ARRAY(
        SELECT windlass.window_key(u.kind, u.name, u.payload)
        FROM unnest(window_kinds, window_keys, payloads) WITH ORDINALITY AS u (kind, name, payload, ordinal)
        ORDER BY u.ordinal
    );
    SELECT array_agg(w.type ORDER BY w.first), array_agg(w.key ORDER BY w.first),
        array_agg(w.first ORDER BY w.first), array_agg(w.last ORDER BY w.first)
    INTO opened, opened_keys, firsts, lasts
    FROM (
        SELECT u.type, u.key, min(u.ordinal) AS first, max(u.ordinal) AS last
        FROM unnest(types, whole_keys) WITH ORDINALITY AS u (type, key, ordinal)
        WHERE u.key IS NOT NULL
        GROUP BY u.type, u.key
    ) w;
    named := windlass.picked(task_ids, firsts);
    IF repeated THEN
        -- What this call has added before stays as it is.
        known := windlass.known_among(named);
    END IF;
    undecided := ARRAY(
        SELECT u.ordinal FROM unnest(named) WITH ORDINALITY AS u (id, ordinal) WHERE u.id <> ALL (known)
        ORDER BY u.ordinal
    );
    SELECT array_agg(coalesce(t.id, u.id) ORDER BY u.ordinal) INTO named
    FROM unnest(named) WITH ORDINALITY AS u (id, ordinal)
    LEFT JOIN unnest(undecided, windlass.take_windows(
        windlass.picked(opened, undecided), windlass.picked(opened_keys, undecided),
        windlass.picked(named, undecided),
        windlass.picked(window_seconds, windlass.picked(firsts, undecided))
    )) AS t (ordinal, id) ON t.ordinal = u.ordinal;

    -- Of a debounce the last one counts, also within this call.
    moved := ARRAY(
        SELECT w.ordinal
        FROM unnest(firsts, named) WITH ORDINALITY AS w (first, id, ordinal)
        WHERE w.ordinal = ANY (undecided) AND window_kinds[w.first] = 'debounce' AND w.id <> task_ids[w.first]
    );
    IF moved <> '{}' THEN
        PERFORM windlass.replace_waiting(
            windlass.picked(named, moved), windlass.picked(payloads, windlass.picked(lasts, moved)),
            windlass.picked(window_seconds, windlass.picked(lasts, moved))
        );
    END IF;
    FOREACH one IN ARRAY undecided LOOP
        IF window_kinds[firsts[one]] = 'debounce' AND one <> ALL (moved) THEN
            delays := coalesce(delays, array_fill(NULL::float8, ARRAY[cardinality(task_ids)]));
            delays[firsts[one]] := window_seconds[lasts[one]];
            payloads[firsts[one]] := payloads[lasts[one]];
        END IF;
    END LOOP;

    SELECT coalesce(array_agg(k.ordinal), '{}'), coalesce(array_agg(k.named), '{}') INTO found, found_ids
    FROM (
        SELECT u.ordinal, w.named
        FROM unnest(task_ids, types, whole_keys) WITH ORDINALITY AS u (id, type, key, ordinal)
        JOIN unnest(opened, opened_keys, firsts, named) AS w (type, key, first, named)
            ON w.type = u.type AND w.key = u.key
        WHERE w.first <> u.ordinal OR w.named <> u.id
    ) k;
    kept := ARRAY(
        SELECT u.ordinal FROM unnest(task_ids) WITH ORDINALITY AS u (id, ordinal) WHERE u.ordinal <> ALL (found)
        ORDER BY u.ordinal
    );
    RETURN QUERY SELECT u.ordinal - 1, u.id FROM unnest(found, found_ids) AS u (ordinal, id);
    IF kept = '{}' AND fence_token IS NULL THEN
        RETURN;
    END IF;
    IF found <> '{}' THEN
        task_ids := windlass.picked(task_ids, kept);
        types := windlass.picked(types, kept);
        queues := windlass.picked(queues, kept);
        priorities := windlass.picked(priorities, kept);
        payloads := windlass.picked(payloads, kept);
        max_attempts := windlass.picked(max_attempts, kept);
        delays := windlass.picked(delays, kept);
        due_times := windlass.picked(due_times, kept);
        keys := windlass.picked(keys, kept);
        tag_lists := windlass.picked(tag_lists, kept);
        retentions := windlass.picked(retentions, kept);
        expiries := windlass.picked(expiries, kept);
        expiry_delays := windlass.picked(expiry_delays, kept);
        ordering_keys := windlass.picked(ordering_keys, kept);
        keeps_keys := windlass.picked(keeps_keys, kept);
        limit_bys := windlass.picked(limit_bys, kept);
    END IF;
    IF array_remove(keys, NULL) = '{}' THEN
        keys := NULL;
    END IF;
    IF keys IS NULL THEN
        RETURN QUERY SELECT kept[k.ordinal + 1] - 1, k.task_id FROM windlass.enqueue_expiring(
            task_ids, types, queues, priorities, payloads, max_attempts, delays, due_times, keys, tag_lists,
            retentions, fence_token, fence_task, fence_generation, repeated, caller_commits, expiries,
            expiry_delays, ordering_keys, keeps_keys, limit_bys
        ) k;
        RETURN;
    END IF;
    BEGIN
        RETURN QUERY SELECT kept[k.ordinal + 1] - 1, k.task_id FROM windlass.enqueue_expiring(
            task_ids, types, queues, priorities, payloads, max_attempts, delays, due_times, keys, tag_lists,
            retentions, fence_token, fence_task, fence_generation, repeated, caller_commits, expiries,
            expiry_delays, ordering_keys, keeps_keys, limit_bys
        ) k;
    EXCEPTION WHEN SQLSTATE 'WL002' THEN
        -- Its index is counted among those that are added.
        GET STACKED DIAGNOSTICS said = MESSAGE_TEXT, place = PG_EXCEPTION_DETAIL, way_out = PG_EXCEPTION_HINT;
        one := kept[place::integer + 1] - 1;
        RAISE EXCEPTION '%', CASE WHEN numbered THEN format('item %s: ', one) ELSE '' END || said
            USING ERRCODE = 'WL002', DETAIL = one, HINT = way_out;
    END;
END
$$;

CREATE FUNCTION windlass.enter_gates(task_ids uuid[], types text[], payloads text[], ordering_keys text[], keeps_keys boolean[], limit_bys text[], are_later boolean[]) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
#variable_conflict use_column
DECLARE
    at constant timestamptz := windlass.clock();
BEGIN
    WITH asked AS MATERIALIZED (
        SELECT
            u.*, windlass.order_gate(u.ordering_key) AS order_gate, v.value, windlass.limit_gate(u.type, v.value) AS limit_gate
        FROM unnest(task_ids, types, payloads, ordering_keys, keeps_keys, limit_bys, are_later) WITH ORDINALITY
            AS u (id, type, payload, ordering_key, keeps_key, limit_by, is_later, ordinal)
        CROSS JOIN LATERAL (
            SELECT CASE WHEN u.limit_by IS NOT NULL
                THEN windlass.limit_value(u.payload::jsonb, u.limit_by::jsonb) END AS value
            OFFSET 0  -- worked out once
        ) v
    ), noted AS (
        INSERT INTO windlass.task_gate (
            task_id, ordering_key, order_gate, limit_type, limit_value, limit_gate, limit_by, keeps_key
        )
        SELECT
            a.id, a.ordering_key, a.order_gate, CASE WHEN a.value IS NOT NULL THEN a.type END, a.value, a.limit_gate,
            a.limit_by::jsonb, coalesce(a.keeps_key, false)
        FROM asked a
    ), waiting AS (
        INSERT INTO windlass.gate_entry (gate, task_id)
        SELECT coalesce(a.order_gate, a.limit_gate), a.id
        FROM asked a
        WHERE a.order_gate IS NOT NULL OR NOT a.is_later
        ORDER BY a.ordinal
    )
    INSERT INTO windlass.gate_call (gate, due)
    SELECT DISTINCT coalesce(a.order_gate, a.limit_gate), at
    FROM asked a
    WHERE a.order_gate IS NOT NULL OR NOT a.is_later;
    IF NOT EXISTS (SELECT FROM windlass.gate_used) THEN
        INSERT INTO windlass.gate_used (since) VALUES (at);
    END IF;
END
$$;

CREATE FUNCTION windlass.expire_tasks(max_tasks integer, retention interval, key_retention interval) RETURNS TABLE(cancelled integer, has_more boolean)
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET enable_material TO 'off'
    SET jit TO 'off'
    AS $$
DECLARE
    late uuid[];
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

    taken := windlass.take_all_waiting(late, true);
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

CREATE FUNCTION windlass.expired_among(task_ids uuid[]) RETURNS uuid[]
    LANGUAGE sql STABLE
    SET enable_seqscan TO 'off'
    SET jit TO 'off'
    AS $$
SELECT array_agg(e.task_id) FROM windlass.expiry e WHERE e.task_id = ANY (task_ids) AND e.expires_at <= windlass.clock()
$$;

CREATE FUNCTION windlass.fail_unknown(unknown text, error jsonb, ready_for interval, max_tasks integer, dead_retention interval, key_retention interval) RETURNS uuid[]
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET enable_material TO 'off'
    SET jit TO 'off'
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
    PERFORM windlass.call_gates(failed);
    PERFORM windlass.call_back(failed);
    RETURN failed;
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

CREATE FUNCTION windlass.forget_expiry(task_ids uuid[]) RETURNS void
    LANGUAGE sql
    SET enable_seqscan TO 'off'
    SET jit TO 'off'
    AS $$
DELETE FROM windlass.expiry e WHERE e.task_id = ANY (task_ids)
$$;

CREATE FUNCTION windlass.forget_lineage(gone uuid[]) RETURNS void
    LANGUAGE sql
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET jit TO 'off'
    AS $$
DELETE FROM windlass.replay r
USING (
    SELECT p.task_id, p.ancestor AS other FROM windlass.replay p WHERE p.task_id = ANY (gone)
    UNION
    SELECT p.task_id, p.task_id FROM windlass.replay p WHERE p.ancestor = ANY (gone)
) k
WHERE r.task_id = k.task_id
    AND NOT EXISTS (SELECT FROM windlass.task t WHERE t.id = k.other)
    AND NOT EXISTS (SELECT FROM windlass.dead d WHERE d.id = k.other)
    AND NOT EXISTS (SELECT FROM windlass.history h WHERE h.id = k.other)
$$;

CREATE FUNCTION windlass.gate_name(number bigint) RETURNS TABLE(type text, name text)
    LANGUAGE sql STABLE
    AS $$
SELECT
    CASE WHEN number & 1 = 1 THEN t.limit_type END,
    CASE WHEN number & 1 = 1 THEN t.limit_value ELSE t.ordering_key END
FROM windlass.gate_entry e
JOIN windlass.task_gate t ON t.task_id = ANY (ARRAY[e.task_id])
WHERE e.gate = number
LIMIT 1
$$;

CREATE FUNCTION windlass.gate_room(number bigint, type text, value text, held bigint, tokens double precision, counted_at timestamp with time zone, at timestamp with time zone) RETURNS TABLE(room integer, slots integer, rate double precision, burst double precision, tokens double precision, most double precision)
    LANGUAGE sql STABLE
    AS $$
SELECT
    greatest(0, least(1000, s.slots - held, floor(b.tokens + 1e-6)))::integer,
    s.slots, r.rate, r.burst, b.tokens, u.most
FROM (VALUES (1)) AS one
LEFT JOIN LATERAL (
    -- The first there is: of this value or of each, set by an operator or declared by code. Nothing has to be sorted.
    SELECT v.concurrency, v.rate, v.burst, v.weight, true AS is_ruled
    FROM windlass.value_rule v
    WHERE number & 1 = 1 AND v.type = gate_room.type AND v.value = gate_room.value AND v.by_operator
    UNION ALL
    SELECT v.concurrency, v.rate, v.burst, v.weight, true
    FROM windlass.value_rule v
    WHERE number & 1 = 1 AND v.type = gate_room.type AND v.value = gate_room.value AND NOT v.by_operator
    UNION ALL
    SELECT v.concurrency, v.rate, v.burst, v.weight, true
    FROM windlass.value_rule v
    WHERE number & 1 = 1 AND v.type = gate_room.type AND v.value IS NULL AND v.by_operator
    UNION ALL
    SELECT v.concurrency, v.rate, v.burst, v.weight, true
    FROM windlass.value_rule v
    WHERE number & 1 = 1 AND v.type = gate_room.type AND v.value IS NULL AND NOT v.by_operator
    LIMIT 1
) r ON true
CROSS JOIN LATERAL (
    SELECT CASE
        WHEN number & 1 = 0 THEN 1
        WHEN r.is_ruled THEN coalesce(r.concurrency, 100 * coalesce(r.weight, 1))
    END AS slots
) s
CROSS JOIN LATERAL (
    SELECT CASE WHEN r.rate IS NOT NULL THEN r.burst - (
        SELECT count(*)
        FROM (
            -- As many are open, and they come first: the others are not walked over.
            SELECT e.task_id FROM windlass.gate_entry e WHERE e.gate = number AND e.is_open ORDER BY e.x, e.n LIMIT held
        ) e
        JOIN windlass.ready w ON w.task_id = ANY (ARRAY[e.task_id])
    ) END AS most
    OFFSET 0
) u
CROSS JOIN LATERAL (
    SELECT CASE
        WHEN r.rate IS NULL THEN NULL
        -- After the clock has jumped back nobody knows how long ago it was counted.
        WHEN gate_room.tokens IS NULL OR counted_at > at THEN u.most
        ELSE least(u.most, gate_room.tokens + date_part('epoch', at - counted_at) * r.rate)
    END AS tokens
) b
$$;

CREATE FUNCTION windlass.gate_status(waiting uuid) RETURNS windlass.task_status
    LANGUAGE plpgsql STABLE
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET jit TO 'off'
    AS $$
DECLARE
    entry record;
    at constant timestamptz := windlass.clock();
    number bigint;
    used integer;
    before integer;
    rule record;
BEGIN
    SELECT e.gate, e.x, e.n, t.scheduled_for, k.limit_gate, k.limit_type, k.limit_value INTO entry
    FROM windlass.gate_entry e
    JOIN windlass.task t ON t.id = e.task_id
    JOIN windlass.task_gate k ON k.task_id = e.task_id
    WHERE e.task_id = waiting AND NOT e.is_open;
    number := entry.gate;
    IF number & 1 = 0 THEN
        IF windlass.gate_used_by(number) > 0 OR EXISTS (
            SELECT FROM windlass.gate_entry o
            WHERE o.gate = number AND NOT o.is_open AND (o.x, o.n) < (entry.x, entry.n)
        ) THEN
            RETURN 'blocked';
        ELSIF entry.scheduled_for > at THEN
            RETURN 'scheduled';
        ELSIF entry.limit_gate IS NULL THEN
            RETURN 'pending';
        END IF;
        -- It would come to that of its value, and be the last one there.
        number := entry.limit_gate; entry.x := NULL;
    END IF;
    used := windlass.gate_used_by(number);
    SELECT r.slots, floor(r.tokens + 1e-6) AS tokens INTO rule
    FROM (VALUES (1)) AS one
    LEFT JOIN windlass.gate g ON g.gate = number
    CROSS JOIN LATERAL windlass.gate_room(
        number, entry.limit_type, entry.limit_value, coalesce(g.held, 0), g.tokens, g.counted_at, at) r;
    SELECT count(*) INTO before
    FROM (
        SELECT
        FROM windlass.gate_entry o
        WHERE o.gate = number AND NOT o.is_open AND (entry.x IS NULL OR (o.x, o.n) < (entry.x, entry.n))
        LIMIT greatest(0, least(1000, rule.slots, rule.tokens))
    ) o;
    RETURN CASE WHEN used + before >= rule.slots OR before >= rule.tokens THEN 'blocked' ELSE 'pending' END;
END
$$;

CREATE FUNCTION windlass.gate_used_by(number bigint) RETURNS integer
    LANGUAGE sql STABLE
    AS $$
SELECT coalesce((SELECT g.held FROM windlass.gate g WHERE g.gate = number), 0)
    - (SELECT count(*)::integer FROM windlass.gate_call c WHERE c.leaving IS NOT NULL AND c.gate = number)
$$;

CREATE FUNCTION windlass.give_back(tokens uuid[], ended uuid[]) RETURNS void
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET jit TO 'off'
    AS $$
DECLARE
    returned record;
    was_used integer;
    is_wanted boolean := false;
BEGIN
    FOR returned IN
        SELECT DISTINCT h.scope, h.name
        FROM windlass.claim_limit h
        WHERE h.token = ANY (ARRAY(SELECT DISTINCT u.token FROM unnest(tokens) AS u (token)))
        ORDER BY 1, 2
    LOOP
        PERFORM windlass.lock_limit(returned.scope, returned.name);
    END LOOP;
    FOR returned IN
        WITH gave AS MATERIALIZED (
            SELECT u.token, count(*)::integer AS tasks, array_agg(u.id) AS ids
            FROM unnest(tokens, ended) AS u (token, id)
            GROUP BY u.token
        ), counted AS MATERIALIZED (
            SELECT h.ctid AS place, h.scope, h.name, h.remaining, least(h.remaining, k.tasks) AS tasks
            FROM gave g
            JOIN windlass.claim_limit h ON h.token = g.token
            CROSS JOIN LATERAL (
                SELECT CASE
                    WHEN h.task_ids IS NULL THEN g.tasks
                    ELSE (
                        SELECT count(*)::integer
                        FROM (SELECT unnest(h.task_ids) INTERSECT SELECT unnest(g.ids)) AS i
                    )
                END AS tasks
            ) k
            WHERE k.tasks > 0
        ), gone AS (
            DELETE FROM windlass.claim_limit h
            USING counted c
            WHERE h.ctid = c.place AND c.tasks = c.remaining
        ), fewer AS (
            UPDATE windlass.claim_limit h
            SET remaining = h.remaining - c.tasks
            FROM counted c
            WHERE h.ctid = c.place AND c.tasks < c.remaining
        )
        SELECT c.scope, c.name, sum(c.tasks)::integer AS tasks, (
            SELECT r.concurrency
            FROM windlass.lane_rule r
            WHERE r.scope = c.scope AND r.name = c.name
            ORDER BY r.by_operator DESC
            LIMIT 1
        ) AS concurrency
        FROM counted c
        GROUP BY c.scope, c.name
        ORDER BY c.scope, c.name
    LOOP
        was_used := windlass.change_use(returned.scope, returned.name, -returned.tasks, NULL, windlass.clock());
        -- Whoever was turned away sleeps.
        is_wanted := is_wanted OR was_used >= coalesce(returned.concurrency, 0);
    END LOOP;
    IF is_wanted THEN
        PERFORM windlass.wake(false);
    END IF;
END
$$;

CREATE FUNCTION windlass.is_large(payload text) RETURNS boolean
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    AS $$SELECT octet_length(payload) > 2000$$;

CREATE FUNCTION windlass.is_limited(queue text, type text) RETURNS boolean
    LANGUAGE plpgsql STABLE
    AS $$
BEGIN
    RETURN EXISTS (
        SELECT
        FROM windlass.lane_rule r
        WHERE (r.scope = 'queue' AND r.name = queue OR r.scope = 'type' AND r.name = is_limited.type)
            AND (r.concurrency IS NOT NULL OR r.rate IS NOT NULL)
    ) OR EXISTS (SELECT FROM windlass.paused_type p WHERE p.type = is_limited.type);
END
$$;

CREATE FUNCTION windlass.is_whole(given jsonb, lowest bigint, highest bigint) RETURNS boolean
    LANGUAGE plpgsql IMMUTABLE
    AS $$
BEGIN
    IF jsonb_typeof(given) = 'number' THEN
        RETURN scale(given::numeric) = 0 AND given::numeric BETWEEN lowest AND highest;
    END IF;
    RETURN given IS NULL;
END
$$;

CREATE FUNCTION windlass.known_among(task_ids uuid[]) RETURNS uuid[]
    LANGUAGE sql STABLE
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET jit TO 'off'
    AS $$
SELECT coalesce(array_agg(u.id), '{}')
FROM unnest(task_ids) AS u (id)
WHERE EXISTS (SELECT FROM windlass.task t WHERE t.id = u.id)
    OR EXISTS (SELECT FROM windlass.history h WHERE h.id = u.id)
    OR EXISTS (SELECT FROM windlass.dead d WHERE d.id = u.id)
$$;

CREATE FUNCTION windlass.lane_number(queue text, type text, priority smallint, kind smallint) RETURNS bigint
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    AS $$
SELECT hashtextextended(
    (queue || E'\x1f' || type || E'\x1f' || priority::text || E'\x1f' || kind::text) COLLATE "C",
    0
)
$$;

CREATE FUNCTION windlass.lane_of_type(wanted text, from_lane bigint) RETURNS bigint
    LANGUAGE sql STABLE
    AS $$
SELECT min(l.lane)
FROM (
    SELECT k.lane FROM windlass.lane k WHERE k.type = wanted AND k.lane >= from_lane
    UNION ALL SELECT r.lane FROM windlass.resting_lane r WHERE r.type = wanted AND r.lane >= from_lane
) l
$$;

CREATE FUNCTION windlass.leave_gates(task_ids uuid[], are_completed boolean) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET enable_material TO 'off'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET jit TO 'off'
    AS $$
#variable_conflict use_column
DECLARE
    gates bigint[];
    numbers integer[];
BEGIN
    IF are_completed THEN
        WITH gone AS (
            DELETE FROM windlass.gate_entry e WHERE e.task_id = ANY (task_ids) AND e.is_open RETURNING e.gate
        )
        SELECT array_agg(k.gate), array_agg(k.tasks) INTO gates, numbers
        FROM (SELECT g.gate, count(*)::integer AS tasks FROM gone g GROUP BY g.gate) k;
    ELSE
        WITH gone AS (
            DELETE FROM windlass.gate_entry e
            USING windlass.left_by(task_ids) AS u
            WHERE e.task_id = ANY (ARRAY[u.task_id]) AND (e.gate = u.gate) IS TRUE AND e.is_open
            RETURNING e.gate
        )
        SELECT array_agg(k.gate), array_agg(k.tasks) INTO gates, numbers
        FROM (SELECT g.gate, count(*)::integer AS tasks FROM gone g GROUP BY g.gate) k;
    END IF;
    IF gates IS NOT NULL THEN
        PERFORM windlass.pass_gates('{}', gates, numbers, '{}');
    END IF;
END
$$;

CREATE FUNCTION windlass.left_by(task_ids uuid[]) RETURNS TABLE(task_id uuid, gate bigint)
    LANGUAGE sql STABLE
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET jit TO 'off'
    AS $$
SELECT e.task_id, e.gate
FROM windlass.gate_entry e
WHERE e.task_id = ANY (task_ids) AND e.is_open AND CASE
    WHEN EXISTS (SELECT FROM windlass.task t WHERE t.id = ANY (ARRAY[e.task_id])) THEN
        e.gate & 1 = 1 AND EXISTS (SELECT FROM windlass.scheduled s WHERE s.task_id = ANY (ARRAY[e.task_id]))
    ELSE e.gate & 1 = 1 OR NOT (
        EXISTS (SELECT FROM windlass.task_gate k WHERE k.task_id = ANY (ARRAY[e.task_id]) AND k.keeps_key)
        AND EXISTS (SELECT FROM windlass.dead d WHERE d.id = ANY (ARRAY[e.task_id]))
    )
END
$$;

CREATE FUNCTION windlass.let_expire(task_ids uuid[], expiries timestamp with time zone[]) RETURNS void
    LANGUAGE sql
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET jit TO 'off'
    AS $$
INSERT INTO windlass.expiry (task_id, expires_at)
SELECT u.id, u.expires_at
FROM unnest(task_ids, expiries) AS u (id, expires_at)
WHERE u.expires_at IS NOT NULL
    AND EXISTS (SELECT FROM windlass.task t WHERE t.id = u.id AND t.generation = 1)
ON CONFLICT DO NOTHING
$$;

CREATE FUNCTION windlass.limit_gate(type text, value text) RETURNS bigint
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    AS $$
SELECT hashtextextended((type || E'\x1f' || value) COLLATE "C", 0) | 1::bigint
$$;

CREATE FUNCTION windlass.limit_room(scope text, name text, concurrency integer, rate double precision, burst double precision, at timestamp with time zone) RETURNS TABLE(room integer, tokens double precision)
    LANGUAGE sql STABLE
    AS $$
SELECT
    greatest(0, least(concurrency - coalesce(u.used, 0), floor(b.tokens + 1e-6)))::integer,
    b.tokens
FROM (VALUES (1)) AS one
LEFT JOIN LATERAL (
    SELECT k.used, k.tokens, k.counted_at
    FROM windlass.limit_use k
    WHERE k.scope = limit_room.scope AND k.name = limit_room.name
    ORDER BY k.version DESC
    LIMIT 1
) u ON true
CROSS JOIN LATERAL (
    SELECT CASE
        WHEN rate IS NULL THEN NULL
        WHEN u.tokens IS NULL OR u.counted_at > at THEN burst
        ELSE least(burst, u.tokens + date_part('epoch', at - u.counted_at) * rate)
    END AS tokens
) b
$$;

CREATE FUNCTION windlass.limit_value(payload jsonb, limit_by jsonb) RETURNS text
    LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
    AS $$
DECLARE
    name text := limit_by #>> '{0,0}';
    value text;
BEGIN
    IF jsonb_array_length(limit_by) = 1 THEN
        value := coalesce(CASE WHEN payload ? name THEN payload ->> name ELSE limit_by #>> '{0,1}' END, 'null');
    ELSE
        SELECT jsonb_agg(
            CASE WHEN payload ? (b.argument ->> 0) THEN payload ->> (b.argument ->> 0) ELSE b.argument ->> 1 END
            ORDER BY b.ordinal
        )::text
        INTO value
        FROM jsonb_array_elements(limit_by) WITH ORDINALITY AS b (argument, ordinal);
    END IF;
    RETURN CASE WHEN length(value) > 200 THEN left(value, 160) || '…' || md5(value) ELSE value END;
END
$$;

CREATE FUNCTION windlass.lock_limit(scope text, name text) RETURNS void
    LANGUAGE sql
    AS $$
SELECT pg_advisory_xact_lock(hashtextextended(
    format('%s %s %s', 'windlass.limit_use'::regclass::oid, scope, name), 0))
$$;

CREATE FUNCTION windlass.make_ready(through uuid[]) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET enable_material TO 'off'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    SET jit TO 'off'
    AS $$
#variable_conflict use_column
DECLARE
    own constant xid8 := pg_current_xact_id();
BEGIN
    WITH asked AS MATERIALIZED (
        SELECT
            t.id, t.generation, t.scheduled_for, t.queue, t.type, t.priority, k.kind, u.ordinal,
            windlass.lane_number(t.queue, t.type, t.priority, k.kind) AS lane
        FROM unnest(through) WITH ORDINALITY AS u (id, ordinal)
        JOIN windlass.task t ON t.id = ANY (ARRAY[u.id])
        CROSS JOIN LATERAL (SELECT (CASE WHEN t.recoveries >= 2 THEN 2 ELSE 0 END)::smallint AS kind) k
    ), added AS (
        INSERT INTO windlass.ready (lane, x, task_id, generation, ready_at)
        SELECT a.lane, own, a.id, a.generation, a.scheduled_for FROM asked a ORDER BY a.ordinal
    )
    INSERT INTO windlass.lane (lane, queue, type, priority, kind)
    SELECT k.*
    FROM (SELECT DISTINCT a.lane, a.queue, a.type, a.priority, a.kind FROM asked a) k
    WHERE NOT EXISTS (SELECT FROM windlass.lane l WHERE l.lane = ANY (ARRAY[k.lane]));
END
$$;

CREATE FUNCTION windlass.mend_gates(first_gate bigint) RETURNS integer
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET enable_material TO 'off'
    SET jit TO 'off'
    AS $$
DECLARE
    at constant timestamptz := windlass.clock();
    numbers constant bigint[] := ARRAY(
        SELECT g.gate FROM windlass.gate g WHERE g.gate >= first_gate ORDER BY g.gate LIMIT 5000
    );
    called integer;
    passed_over bigint[];
BEGIN
    INSERT INTO windlass.gate_call (gate, due, leaving)
    SELECT l.gate, at, l.task_id
    FROM windlass.left_by(ARRAY(
        SELECT e.task_id
        FROM windlass.gate g
        CROSS JOIN LATERAL (
            SELECT o.task_id
            FROM windlass.gate_entry o
            WHERE o.gate = g.gate AND o.is_open
            ORDER BY o.x, o.n
            LIMIT g.held
        ) e
        WHERE g.gate = ANY (numbers)
            AND NOT EXISTS (SELECT FROM windlass.task t WHERE t.id = ANY (ARRAY[e.task_id]))
            -- What has just ended leaves by itself.
            AND NOT EXISTS (
                SELECT FROM windlass.history h
                WHERE h.id = ANY (ARRAY[e.task_id]) AND h.completed_at > at - interval '1 minute'
            )
            AND NOT EXISTS (
                SELECT FROM windlass.dead d
                WHERE d.id = ANY (ARRAY[e.task_id]) AND d.completed_at > at - interval '1 minute'
            )
    )) l
    WHERE NOT EXISTS (SELECT FROM windlass.gate_call c WHERE c.leaving = ANY (ARRAY[l.task_id]) AND c.gate = l.gate);
    GET DIAGNOSTICS called = ROW_COUNT;
    passed_over := ARRAY(
        SELECT g.gate
        FROM windlass.gate g
        CROSS JOIN LATERAL (
            SELECT FROM windlass.gate_entry e
            WHERE e.gate = g.gate AND (e.x, e.n) <= (g.from_x, g.from_n) AND NOT e.is_open
            LIMIT 1
        ) e
        WHERE g.gate = ANY (numbers)
        ORDER BY g.gate
        FOR UPDATE OF g SKIP LOCKED
    );
    UPDATE windlass.gate g SET from_x = '0', from_n = -1 WHERE g.gate = ANY (passed_over);
    INSERT INTO windlass.gate_call (gate, due) SELECT u.gate, at FROM unnest(passed_over) AS u (gate);
    RETURN called + cardinality(passed_over);
END
$$;

CREATE FUNCTION windlass.new_task_id() RETURNS uuid
    LANGUAGE sql
    AS $$
SELECT encode(
    set_byte(
        overlay(
            uuid_send(gen_random_uuid())
            PLACING substring(int8send((extract(epoch FROM clock_timestamp()) * 1000)::bigint) FROM 3)
            FROM 1 FOR 6
        ),
        6, 112 + (get_byte(uuid_send(gen_random_uuid()), 6) & 15)
    ),
    'hex'
)::uuid
$$;

CREATE FUNCTION windlass.open_limits(types text[], queues text[], lanes bigint[], from_x bigint[], from_n bigint[], all_of_them boolean, other_than text[]) RETURNS TABLE(scope text, name text, is_counted boolean, rate double precision, burst double precision, room integer, tokens double precision, counted_at timestamp with time zone)
    LANGUAGE plpgsql
    AS $$
#variable_conflict use_column
DECLARE
    rule record;
BEGIN
    FOR rule IN
        SELECT r.scope, r.name, r.concurrency, r.rate, r.burst
        FROM windlass.lane_rule_in_force r
        WHERE (r.concurrency IS NOT NULL OR r.rate IS NOT NULL)
            AND EXISTS (
                SELECT
                FROM windlass.lane k
                LEFT JOIN unnest(lanes, from_x, from_n) AS b (lane, x, n) ON b.lane = k.lane
                WHERE k.type = ANY (types) AND (queues IS NULL OR k.queue = ANY (queues))
                    AND (other_than IS NULL OR k.queue <> ALL (other_than))
                    AND NOT EXISTS (
                        SELECT FROM windlass.queue q WHERE q.name = k.queue AND q.paused_at IS NOT NULL
                    )
                    AND NOT EXISTS (SELECT FROM windlass.paused_type p WHERE p.type = k.type)
                    AND CASE r.scope WHEN 'queue' THEN k.queue = r.name ELSE k.type = r.name END
                    AND (all_of_them OR EXISTS (
                        SELECT
                        FROM windlass.ready w
                        WHERE w.lane = k.lane
                            AND (w.x, w.n) > (coalesce(b.x, 0)::text::xid8, coalesce(b.n, -1))
                    ))
            )
        ORDER BY r.scope, r.name
    LOOP
        counted_at := windlass.clock();
        SELECT u.room, u.tokens INTO room, tokens
        FROM windlass.limit_room(rule.scope, rule.name, rule.concurrency, rule.rate, rule.burst, counted_at) u;
        IF room > 0 THEN
            PERFORM windlass.lock_limit(rule.scope, rule.name);
            counted_at := windlass.clock();
            SELECT u.room, u.tokens INTO room, tokens
            FROM windlass.limit_room(rule.scope, rule.name, rule.concurrency, rule.rate, rule.burst, counted_at) u;
        END IF;
        scope := rule.scope; name := rule.name; is_counted := rule.concurrency IS NOT NULL;
        rate := rule.rate; burst := rule.burst;
        RETURN NEXT;
    END LOOP;
END
$$;

CREATE FUNCTION windlass.order_gate(ordering_key text) RETURNS bigint
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    AS $$
SELECT hashtextextended(ordering_key COLLATE "C", 0) & ~1::bigint
$$;

CREATE FUNCTION windlass.others_than(these bigint[], last integer) RETURNS bigint[]
    LANGUAGE sql IMMUTABLE
    RETURN ARRAY(SELECT a.n FROM generate_series((1)::bigint, (others_than.last)::bigint) a(n) EXCEPT SELECT t.n FROM unnest(others_than.these) t(n));

CREATE FUNCTION windlass.pass_gates(called bigint[], left_gates bigint[], left_numbers integer[], leaving uuid[]) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET enable_material TO 'off'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    SET jit TO 'off'
    AS $$
#variable_conflict use_column
DECLARE
    numbers bigint[];
    entered bigint[] := '{}';
    through uuid[];
    emptied bigint[];
    full_in float8[];  -- seconds until the bucket of each is full; NULL: it is, or there is none
    missing bigint[];
    present bigint[];
    nameless bigint[];
    at timestamptz;
    no_older xid8;  -- whatever comes yet is of this transaction or a later one
    has_news boolean := false;
BEGIN
    FOR is_limit IN 0..1 LOOP
        numbers := ARRAY(
            SELECT DISTINCT u.gate FROM unnest(called || left_gates || entered) AS u (gate)
            WHERE u.gate & 1 = is_limit
            ORDER BY 1
        );
        CONTINUE WHEN numbers = '{}';
        SELECT array_agg(k.gate) FILTER (WHERE NOT k.is_there), array_agg(k.gate) FILTER (WHERE k.is_there)
        INTO missing, present
        FROM (
            SELECT u.gate, EXISTS (SELECT FROM windlass.gate o WHERE o.gate = ANY (ARRAY[u.gate])) AS is_there
            FROM unnest(numbers) AS u (gate)
        ) k;
        WITH wanted AS MATERIALIZED (
            SELECT u.gate, k.type, k.name
            FROM unnest(missing) AS u (gate)
            CROSS JOIN LATERAL windlass.gate_name(u.gate) k
            UNION ALL
            SELECT u.gate, NULL, '' FROM unnest(present) AS u (gate)
        ), made AS (
            INSERT INTO windlass.gate AS g (gate, type, name)
            SELECT w.gate, w.type, w.name FROM wanted w ORDER BY w.gate
            ON CONFLICT (gate) DO UPDATE SET held = g.held WHERE false  -- locked, and not written
            RETURNING g.gate, g.name
        )
        -- At one that was not there nobody may be, and it is not locked: who comes calls again.
        SELECT (SELECT array_agg(w.gate) FROM wanted w), (SELECT array_agg(m.gate) FROM made m WHERE m.name = '')
        INTO numbers, nameless;
        CONTINUE WHEN numbers IS NULL;
        IF nameless IS NOT NULL THEN
            -- Removed by whoever had it before us. One that is nobody's yet is left to who comes.
            UPDATE windlass.gate g
            SET type = k.type, name = k.name
            FROM unnest(nameless) AS u (gate)
            CROSS JOIN LATERAL windlass.gate_name(u.gate) k
            WHERE g.gate = ANY (ARRAY[u.gate]);
            DELETE FROM windlass.gate g WHERE g.gate = ANY (nameless) AND g.type IS NULL AND g.name = '';
        END IF;

        IF leaving <> '{}' THEN
            WITH gone AS (
                DELETE FROM windlass.gate_entry e
                USING windlass.left_by(leaving) AS u
                WHERE e.task_id = ANY (ARRAY[u.task_id]) AND (e.gate = u.gate) IS TRUE AND e.is_open
                    AND e.gate = ANY (numbers)
                RETURNING e.gate
            ), counted AS (
                SELECT o.gate, count(*)::integer AS tasks FROM gone o GROUP BY o.gate
            )
            SELECT left_gates || coalesce(array_agg(c.gate), '{}'), left_numbers || coalesce(array_agg(c.tasks), '{}')
            INTO left_gates, left_numbers
            FROM counted c;
        END IF;
        at := windlass.clock();
        no_older := pg_snapshot_xmin(pg_current_snapshot());
        WITH room AS MATERIALIZED (
            SELECT
                g.gate, g.called_for, g.held - l.tasks AS held, l.tasks AS gone, r.*,
                -- Beyond all there are: it is of a database that was copied to a server which counts anew.
                CASE WHEN g.from_x > no_older THEN '0'::xid8 ELSE g.from_x END AS from_x,
                CASE WHEN g.from_x > no_older THEN -1 ELSE g.from_n END AS from_n
            FROM (
                SELECT u.gate, sum(u.tasks)::integer AS tasks
                FROM (
                    SELECT n.gate, 0 AS tasks FROM unnest(numbers) AS n (gate)
                    UNION ALL
                    SELECT n.gate, n.tasks FROM unnest(left_gates, left_numbers) AS n (gate, tasks)
                ) u
                GROUP BY u.gate
            ) l
            JOIN windlass.gate g ON g.gate = ANY (ARRAY[l.gate])
            CROSS JOIN LATERAL windlass.gate_room(
                g.gate, g.type, g.name, g.held - l.tasks, g.tokens, g.counted_at, at) r
            WHERE l.gate & 1 = is_limit
        ), first AS MATERIALIZED (
            SELECT m.*, t.*
            FROM room m
            CROSS JOIN LATERAL (
                SELECT
                    count(*)::integer AS tried, max(f.x) AS last_x, (array_agg(f.n))[count(*)] AS last_n,
                    array_agg(f.place) AS places
                FROM (
                    SELECT e.ctid AS place, e.x, e.n
                    FROM windlass.gate_entry e
                    WHERE e.gate = m.gate AND (e.x, e.n) > (m.from_x, m.from_n) AND NOT e.is_open AND m.room > 0
                    ORDER BY e.x, e.n
                    LIMIT m.room
                ) f
            ) t
        ), mine AS MATERIALIZED (
            SELECT e.ctid AS place, e.gate, e.x, e.n, e.task_id
            FROM windlass.gate_entry e
            WHERE e.ctid = ANY (ARRAY(SELECT unnest(f.places) FROM first f)) AND NOT e.is_open
            FOR UPDATE SKIP LOCKED
        ), opened AS (
            UPDATE windlass.gate_entry e
            SET is_open = true
            WHERE e.ctid = ANY (ARRAY(SELECT m.place FROM mine m))
        ), taken AS MATERIALIZED (
            -- All that was tried, as a rule: then there is nothing to be put together.
            SELECT
                (SELECT count(*) FROM mine) = (SELECT sum(f.tried) FROM first f) AS are_all,
                array_agg(k.gate) AS gates, array_agg(k.tasks) AS tasks
            FROM (SELECT m.gate, count(*)::integer AS tasks FROM mine m GROUP BY m.gate) k
        ), counted AS MATERIALIZED (
            SELECT
                m.*,
                CASE
                    WHEN m.tasks < m.tried THEN at + interval '1 second'  -- somebody holds one of them
                    WHEN m.tasks = m.room AND m.room = 1000 THEN at
                    -- What it let through has to be claimed first, and nobody tells of that.
                    WHEN m.most < 1 AND coalesce(m.slots - m.held > 0, true) THEN at + interval '1 second'
                    WHEN m.rate IS NOT NULL AND m.tasks = m.room AND coalesce(m.slots - m.held > m.room, true) THEN
                        -- What comes within a twentieth of a second is worth one look.
                        at + (greatest(1, least(m.burst, m.rate / 20)) - (m.tokens - m.tasks)) / m.rate
                            * interval '1 second'
                END AS again_at
            FROM (
                SELECT f.*, CASE
                    WHEN t.are_all OR f.tried = 0 THEN f.tried
                    ELSE coalesce(t.tasks[array_position(t.gates, f.gate)], 0)
                END AS tasks
                FROM first f
                CROSS JOIN taken t
                OFFSET 0
            ) m
        ), noted AS (
            UPDATE windlass.gate g
            SET held = c.held + c.tasks,
                tokens = c.tokens - c.tasks,
                counted_at = CASE WHEN c.rate IS NOT NULL THEN at END,
                -- Before the last one that was let through nobody waits, but for those whose transactions are open.
                from_x = CASE WHEN c.tasks > 0 AND c.tasks = c.tried THEN least(c.last_x, no_older) ELSE c.from_x END,
                from_n = CASE
                    WHEN c.tasks = 0 OR c.tasks < c.tried THEN c.from_n
                    WHEN c.last_x < no_older THEN c.last_n
                    ELSE -1
                END,
                called_for = CASE
                    WHEN g.called_for > at AND g.called_for <= coalesce(c.again_at, 'infinity') THEN g.called_for
                    ELSE c.again_at
                END
            FROM counted c
            WHERE g.gate = ANY (ARRAY[c.gate]) AND (c.tasks > 0 OR c.gone > 0 OR c.again_at IS NOT NULL)
                -- What is likely to go is not written before.
                AND NOT (c.held = 0 AND c.tried = 0 AND c.again_at IS NULL AND coalesce(c.tokens >= c.burst, true))
        ), called_again AS (
            INSERT INTO windlass.gate_call (gate, due)
            SELECT c.gate, c.again_at
            FROM counted c
            WHERE c.again_at IS NOT NULL AND NOT coalesce(c.called_for > at AND c.called_for <= c.again_at, false)
        )
        SELECT
            (SELECT array_agg(m.task_id ORDER BY m.x, m.n) FROM mine m),
            e.gates, e.full_in
        INTO through, emptied, full_in
        FROM (
            SELECT
                array_agg(c.gate) AS gates,
                array_agg(CASE WHEN c.tokens < c.burst THEN (c.burst - c.tokens) / c.rate END) AS full_in
            FROM counted c
            WHERE c.held + c.tasks = 0
        ) e;
        IF through IS NOT NULL AND is_limit = 0 THEN
            entered := windlass.place_gated(through);
        ELSIF through IS NOT NULL THEN
            PERFORM windlass.make_ready(through);
        END IF;
        has_news := has_news OR through IS NOT NULL;

        IF emptied IS NOT NULL THEN
            -- Where nobody is at it, it goes; but what its bucket lacks is remembered.
            WITH empty AS MATERIALIZED (
                SELECT
                    u.gate, u.full_in,
                    EXISTS (SELECT FROM windlass.gate_entry e WHERE e.gate = ANY (ARRAY[u.gate])) AS is_used
                FROM unnest(emptied, full_in) AS u (gate, full_in)
            ), later AS (
                INSERT INTO windlass.gate_call (gate, due)
                SELECT m.gate, at + m.full_in * interval '1 second'
                FROM empty m
                WHERE NOT m.is_used AND m.full_in IS NOT NULL
            ), kept AS (
                UPDATE windlass.gate g
                SET held = 0
                WHERE g.gate = ANY (ARRAY(SELECT m.gate FROM empty m WHERE m.is_used)) AND g.held > 0
            )
            DELETE FROM windlass.gate g
            WHERE g.gate = ANY (ARRAY(SELECT m.gate FROM empty m WHERE NOT m.is_used AND m.full_in IS NULL));
        END IF;
    END LOOP;
    IF has_news THEN
        PERFORM windlass.wake(false);
    END IF;
END
$$;

CREATE FUNCTION windlass.payload_fault(part jsonb, max_bytes integer) RETURNS text
    LANGUAGE plpgsql STABLE
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $_$
DECLARE
    too_long constant jsonpath := 'strict $.** ? (@.type() == "number"
        && (@.abs() >= 1e4300 || @.abs() > 1e308 && @ != @.floor()))';
    too_long_said constant text := 'a number has more digits than can be read back; pass it as a string';
    said text;
BEGIN
    IF pg_column_size(part) > 1000 THEN
        IF jsonb_path_exists(part, too_long) THEN
            RETURN too_long_said;  -- before its text is made, which could be of gigabytes
        END IF;
    END IF;
    said := part::text;
    IF octet_length(said) > max_bytes THEN
        IF windlass.compact_bytes(part) > max_bytes THEN
            RETURN format('%s bytes are more than the limit of %s; store the data elsewhere and pass a reference',
                windlass.compact_bytes(part), max_bytes);
        END IF;
    END IF;
    IF octet_length(said) < 300 THEN
        RETURN NULL;  -- too short for what follows
    END IF;
    IF jsonb_path_exists(part, 'strict $.**{200} ? (@.type() == "array" || @.type() == "object")') THEN
        RETURN 'it is nested deeper than 200 levels; flatten it, or store the data elsewhere and pass a reference';
    END IF;
    IF said ~ '[0-9]{255}' THEN
        IF jsonb_path_exists(part, too_long) THEN
            RETURN too_long_said;
        END IF;
    END IF;
    RETURN NULL;
END
$_$;

CREATE FUNCTION windlass.picked(given anyarray, places integer[]) RETURNS anyarray
    LANGUAGE sql IMMUTABLE
    AS $$
SELECT CASE WHEN given IS NOT NULL THEN ARRAY(
    SELECT given[u.place] FROM unnest(places) WITH ORDINALITY AS u (place, ordinal) ORDER BY u.ordinal
) END
$$;

CREATE FUNCTION windlass.place_gated(placed uuid[]) RETURNS bigint[]
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET enable_material TO 'off'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    SET jit TO 'off'
    AS $$
#variable_conflict use_column
DECLARE
    at constant timestamptz := windlass.clock();
    entered bigint[];
BEGIN
    WITH asked AS MATERIALIZED (
        SELECT
            t.id, t.generation, t.scheduled_for AS due, t.queue, t.type, t.priority, k.kind, u.ordinal,
            windlass.lane_number(t.queue, t.type, t.priority, k.kind) AS lane,
            CASE
                WHEN g.order_gate IS NOT NULL AND NOT EXISTS (
                    SELECT FROM windlass.gate_entry e
                    WHERE e.task_id = ANY (ARRAY[t.id]) AND (e.gate = g.order_gate) IS TRUE AND e.is_open
                ) THEN g.order_gate
                WHEN t.scheduled_for > at THEN NULL
                WHEN g.limit_gate IS NOT NULL AND NOT EXISTS (
                    SELECT FROM windlass.gate_entry e
                    WHERE e.task_id = ANY (ARRAY[t.id]) AND (e.gate = g.limit_gate) IS TRUE AND e.is_open
                ) THEN g.limit_gate
            END AS gate
        FROM unnest(placed) WITH ORDINALITY AS u (id, ordinal)
        JOIN windlass.task t ON t.id = ANY (ARRAY[u.id])
        JOIN windlass.task_gate g ON g.task_id = ANY (ARRAY[u.id])
        CROSS JOIN LATERAL (SELECT (CASE WHEN t.recoveries >= 2 THEN 2 ELSE 0 END)::smallint AS kind) k
    ), waiting AS (
        INSERT INTO windlass.gate_entry (gate, task_id)
        SELECT a.gate, a.id FROM asked a WHERE a.gate IS NOT NULL ORDER BY a.ordinal
    ), later AS (
        INSERT INTO windlass.scheduled (task_id, lane, generation, due)
        SELECT a.id, a.lane, a.generation, a.due FROM asked a WHERE a.gate IS NULL AND a.due > at
    ), now AS (
        INSERT INTO windlass.ready (lane, task_id, generation, ready_at)
        SELECT a.lane, a.id, a.generation, a.due FROM asked a WHERE a.gate IS NULL AND a.due <= at ORDER BY a.ordinal
    ), listed AS (
        INSERT INTO windlass.lane (lane, queue, type, priority, kind)
        SELECT k.*
        FROM (SELECT DISTINCT a.lane, a.queue, a.type, a.priority, a.kind FROM asked a WHERE a.gate IS NULL) k
        WHERE NOT EXISTS (SELECT FROM windlass.lane l WHERE l.lane = ANY (ARRAY[k.lane]))
    )
    SELECT coalesce(array_agg(DISTINCT a.gate), '{}') INTO entered FROM asked a WHERE a.gate IS NOT NULL;
    RETURN entered;
END
$$;

CREATE FUNCTION windlass.plain_kind(tasks jsonb, max_bytes integer) RETURNS jsonb
    LANGUAGE plpgsql STABLE
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $_$
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
$_$;

CREATE FUNCTION windlass.promote_due(max_tasks integer, all_of_them boolean) RETURNS integer
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET jit TO 'off'
    AS $$
DECLARE
    promoted integer;
    lanes bigint[];
    gated uuid[] := '{}';
    has_gates constant boolean := EXISTS (SELECT FROM windlass.gate_used);
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
        WHERE NOT (has_gates AND EXISTS (
            -- What waits for its time was let through that of its ordering key, if it has one.
            SELECT FROM windlass.task_gate k WHERE k.task_id = ANY (ARRAY[g.task_id]) AND k.limit_gate IS NOT NULL
        ))
        ORDER BY g.due, g.task_id
        RETURNING lane, task_id
    )
    SELECT
        count(*), array_agg(DISTINCT a.lane),
        CASE WHEN has_gates THEN array_agg(g.task_id ORDER BY g.due, g.task_id) FILTER (WHERE a.task_id IS NULL) END
    INTO promoted, lanes, gated
    FROM gone g
    LEFT JOIN added a ON a.task_id = g.task_id;
    IF promoted > 0 THEN
        IF gated IS NOT NULL THEN
            INSERT INTO windlass.gate_call (gate, due)
            SELECT g.gate, latest FROM unnest(windlass.place_gated(gated)) AS g (gate);
        END IF;
        PERFORM windlass.relist_lanes(lanes);
        PERFORM windlass.wake(false);
    END IF;
    RETURN promoted;
END
$$;

CREATE FUNCTION windlass.quoted(said text) RETURNS text
    LANGUAGE sql IMMUTABLE
    AS $$
SELECT q.mark || coalesce(string_agg(
    CASE
        WHEN c.sign IN (E'\\', q.mark) THEN E'\\' || c.sign
        WHEN c.sign = E'\n' THEN E'\\n'
        WHEN c.sign = E'\r' THEN E'\\r'
        WHEN c.sign = E'\t' THEN E'\\t'
        WHEN c.code < 32 OR c.code BETWEEN 127 AND 160 OR c.code = 173 THEN E'\\x' || lpad(to_hex(c.code), 2, '0')
        WHEN c.code BETWEEN 8192 AND 8207 OR c.code BETWEEN 8232 AND 8239 OR c.code BETWEEN 8287 AND 8303
            OR c.code IN (1564, 12288, 65279) THEN E'\\u' || lpad(to_hex(c.code), 4, '0')
        ELSE c.sign
    END, '' ORDER BY c.place
), '') || q.mark
FROM (SELECT CASE WHEN said LIKE '%''%' AND said NOT LIKE '%"%' THEN '"' ELSE '''' END) AS q (mark)
LEFT JOIN (
    SELECT p.sign, ascii(p.sign) AS code, p.place
    FROM regexp_split_to_table(said, '') WITH ORDINALITY AS p (sign, place)
    WHERE said <> ''
) c ON true
GROUP BY q.mark
$$;

CREATE FUNCTION windlass.refuse(code text, said text) RETURNS void
    LANGUAGE plpgsql
    AS $$
BEGIN
    RAISE EXCEPTION '%', said USING ERRCODE = code;
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

CREATE FUNCTION windlass.refuse_id(given uuid[], place integer) RETURNS void
    LANGUAGE plpgsql
    AS $$
BEGIN
    IF place IS NOT NULL THEN
        PERFORM windlass.refuse('WL006',
            CASE WHEN cardinality(given) > 1 THEN format('item %s: ', place) ELSE '' END
            || format('id %s is that of another task; leave it out, and the task gets a new one',
                given[place + 1]));
    END IF;
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
    SET jit TO 'off'
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

CREATE FUNCTION windlass.remove_dead(removed uuid[]) RETURNS SETOF uuid
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET enable_material TO 'off'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET jit TO 'off'
    AS $$
DECLARE
    locked constant uuid[] := ARRAY(
        SELECT d.id
        FROM windlass.dead d
        WHERE d.id = ANY (removed)
        ORDER BY d.id
        FOR UPDATE SKIP LOCKED
    );
BEGIN
    PERFORM set_config('windlass_internal.removing', 'on', true);
    RETURN QUERY
    WITH gone AS (
        DELETE FROM windlass.dead d
        WHERE d.id = ANY (locked)
        RETURNING d.id, d.type, d.idempotency_key, d.tags, d.payload IS NULL AS is_large
    ), forgotten AS (
        DELETE FROM windlass.idempotency i
        USING gone g
        WHERE i.type = g.type AND i.key = g.idempotency_key AND i.task_id = g.id
    ), untagged AS (
        DELETE FROM windlass.task_tag k
        USING (SELECT g.id, unnest(g.tags) AS tag FROM gone g) t
        WHERE k.tag = t.tag AND k.task_id = t.id
    ), emptied AS (
        DELETE FROM windlass.large_payload l
        USING gone g
        WHERE g.is_large AND l.task_id = g.id
    ), gateless AS (
        DELETE FROM windlass.task_gate k USING gone g WHERE k.task_id = g.id
    )
    SELECT g.id FROM gone g;
    PERFORM set_config('windlass_internal.removing', 'off', true);
    PERFORM windlass.forget_lineage(locked);
    PERFORM windlass.call_gates(locked);
END
$$;

CREATE FUNCTION windlass.replace_waiting(waiting uuid[], payloads text[], seconds double precision[]) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET jit TO 'off'
    AS $$
#variable_conflict use_column
DECLARE
    at timestamptz;
BEGIN
    PERFORM FROM windlass.task t WHERE t.id = ANY (waiting) ORDER BY t.id FOR UPDATE;
    at := windlass.clock();
    DELETE FROM windlass.scheduled s WHERE s.task_id = ANY (waiting);
    WITH replaced AS (
        UPDATE windlass.task t
        SET payload = CASE WHEN NOT windlass.is_large(u.payload) THEN u.payload::jsonb END,
            scheduled_for = at + u.seconds * interval '1 second'
        FROM unnest(waiting, payloads, seconds) AS u (id, payload, seconds)
        WHERE t.id = ANY (ARRAY[u.id])
        RETURNING t.id, t.queue, t.type, t.priority, t.generation, t.scheduled_for
    )
    INSERT INTO windlass.scheduled (task_id, lane, generation, due)
    SELECT r.id, windlass.lane_number(r.queue, r.type, r.priority, 0::smallint), r.generation, r.scheduled_for
    FROM replaced r;
    DELETE FROM windlass.large_payload l WHERE l.task_id = ANY (waiting);
    INSERT INTO windlass.large_payload (task_id, payload)
    SELECT u.id, u.payload
    FROM unnest(waiting, payloads) AS u (id, payload)
    WHERE windlass.is_large(u.payload);
    IF EXISTS (SELECT FROM windlass.gate_used) THEN
        -- At the gate of its value it is not yet: it waits for its time first.
        UPDATE windlass.task_gate k
        SET limit_value = n.value, limit_gate = windlass.limit_gate(k.limit_type, n.value)
        FROM (
            SELECT g.task_id, windlass.limit_value(u.payload::jsonb, g.limit_by) AS value
            FROM unnest(waiting, payloads) AS u (id, payload)
            JOIN windlass.task_gate g ON g.task_id = ANY (ARRAY[u.id]) AND g.limit_by IS NOT NULL
            OFFSET 0  -- worked out once
        ) n
        WHERE k.task_id = ANY (ARRAY[n.task_id]);
    END IF;
    PERFORM windlass.wake(false);
END
$$;

CREATE FUNCTION windlass.replay_dead(ancestors uuid[], new_ids uuid[], delays double precision[], payloads text[], again boolean) RETURNS TABLE(answer text, task_id uuid)
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET enable_material TO 'off'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET jit TO 'off'
    AS $$
#variable_conflict use_column
DECLARE
    locked constant uuid[] := ARRAY(
        SELECT d.id
        FROM windlass.dead d
        WHERE d.id = ANY (ancestors)
        ORDER BY d.id
        FOR UPDATE SKIP LOCKED
    );
    answers text[];
    found uuid[];
    part record;
    taken_over uuid[];
BEGIN
    -- With the rows locked: what was replayed meanwhile can be seen by now.
    SELECT
        array_agg(
            CASE
                WHEN EXISTS (SELECT FROM windlass.replay r WHERE r.task_id = u.new_id) THEN 'replayed'
                WHEN d.id IS NULL THEN 'absent'
                WHEN u.ancestor <> ALL (locked) THEN 'held'
                WHEN r.task_id IS NOT NULL AND NOT again THEN 'before'
                ELSE 'new'
            END
            ORDER BY u.ordinal
        ),
        array_agg(r.task_id ORDER BY u.ordinal)
    INTO answers, found
    FROM unnest(ancestors, new_ids) WITH ORDINALITY AS u (ancestor, new_id, ordinal)
    LEFT JOIN windlass.dead d ON d.id = ANY (ARRAY[u.ancestor])
    LEFT JOIN LATERAL (
        SELECT r.task_id
        FROM windlass.replay r
        WHERE r.ancestor = d.id AND r.generation = d.generation
        ORDER BY r.replayed_at DESC, r.task_id DESC
        LIMIT 1
    ) r ON true;

    -- In parts of which an array holds all payloads: it may have one gigabyte at most.
    FOR part IN
        SELECT
            array_agg(k.new_id ORDER BY k.ordinal) AS ids,
            array_agg(k.type ORDER BY k.ordinal) AS types,
            array_agg(k.queue ORDER BY k.ordinal) AS queues,
            array_agg(k.priority ORDER BY k.ordinal) AS priorities,
            array_agg(k.payload ORDER BY k.ordinal) AS payloads,
            array_agg(k.max_attempts ORDER BY k.ordinal) AS max_attempts,
            CASE WHEN max(k.delay) > 0 THEN array_agg(k.delay ORDER BY k.ordinal) END AS delays,
            array_agg(k.tags ORDER BY k.ordinal) AS tag_lists,
            array_agg(k.retention_seconds ORDER BY k.ordinal) AS retentions,
            array_agg(k.ordering_key ORDER BY k.ordinal) AS ordering_keys,
            array_agg(k.keeps_key ORDER BY k.ordinal) AS keeps_keys,
            array_agg(k.limit_by::text ORDER BY k.ordinal) AS limit_bys
        FROM (
            SELECT
                u.ordinal, u.new_id, u.delay, d.type, d.queue, d.priority, d.max_attempts,
                d.retention_seconds, to_jsonb(d.tags)::text AS tags, g.ordering_key, g.keeps_key, g.limit_by,
                coalesce(u.payload, d.payload::text, l.payload) AS payload,
                sum(coalesce(octet_length(u.payload), octet_length(l.payload), 2000))
                    OVER (ORDER BY u.ordinal) / (64 << 20) AS number
            FROM unnest(ancestors, new_ids, delays, payloads, answers) WITH ORDINALITY
                AS u (ancestor, new_id, delay, payload, answer, ordinal)
            JOIN windlass.dead d ON d.id = ANY (ARRAY[u.ancestor])
            LEFT JOIN windlass.large_payload l ON d.payload IS NULL AND l.task_id = ANY (ARRAY[d.id])
            LEFT JOIN windlass.task_gate g ON g.task_id = ANY (ARRAY[d.id])
            WHERE u.answer = 'new'
        ) k
        GROUP BY k.number
        ORDER BY k.number
    LOOP
        PERFORM FROM windlass.enqueue_tasks(
            part.ids, part.types, part.queues, part.priorities, part.payloads, part.max_attempts,
            part.delays, NULL, NULL, part.tag_lists, part.retentions, NULL, NULL, NULL, false, false, false,
            part.ordering_keys, part.keeps_keys, part.limit_bys
        );
        IF array_remove(part.ordering_keys, NULL) <> '{}' THEN
            -- What a letter still keeps of its ordering key goes to the new one, which does not wait for it then.
            WITH kept AS (
                UPDATE windlass.gate_entry e
                SET task_id = u.new_id
                FROM unnest(ancestors, new_ids, answers) AS u (ancestor, new_id, answer)
                WHERE u.answer = 'new' AND u.new_id = ANY (part.ids)
                    AND e.task_id = ANY (ARRAY[u.ancestor]) AND e.is_open AND e.gate & 1 = 0
                RETURNING u.new_id
            )
            SELECT coalesce(array_agg(k.new_id), '{}') INTO taken_over FROM kept k;
            IF taken_over <> '{}' THEN
                DELETE FROM windlass.gate_entry e WHERE e.task_id = ANY (taken_over) AND NOT e.is_open;
                INSERT INTO windlass.gate_call (gate, due)
                SELECT g.gate, windlass.clock() FROM unnest(windlass.place_gated(taken_over)) AS g (gate);
            END IF;
        END IF;
    END LOOP;

    INSERT INTO windlass.replay (task_id, ancestor, generation, depth, replayed_at)
    SELECT u.new_id, d.id, d.generation, coalesce(r.depth, 0) + 1, windlass.clock()
    FROM unnest(ancestors, new_ids, answers) AS u (ancestor, new_id, answer)
    JOIN windlass.dead d ON d.id = ANY (ARRAY[u.ancestor])
    LEFT JOIN windlass.replay r ON r.task_id = ANY (ARRAY[d.id])
    WHERE u.answer = 'new';

    RETURN QUERY
    SELECT
        CASE u.answer WHEN 'new' THEN 'replayed' ELSE u.answer END,
        CASE u.answer WHEN 'before' THEN u.found WHEN 'new' THEN u.new_id WHEN 'replayed' THEN u.new_id END
    FROM unnest(new_ids, answers, found) WITH ORDINALITY AS u (new_id, answer, found, ordinal)
    ORDER BY u.ordinal;
END
$$;

CREATE FUNCTION windlass.rescue_claims(max_claims integer, dead_retention interval, retention interval, key_retention interval) RETURNS TABLE(claims integer, returned integer, lost_attempts integer, dead integer, cancelled integer, died uuid[])
    LANGUAGE plpgsql
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET lock_timeout TO '100ms'
    SET jit TO 'off'
    AS $$
#variable_conflict use_column
DECLARE
    expired record;
    sums record;
    blocked integer := 0;
    over uuid[] := '{}';
    given_back uuid[] := '{}';
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
                array_agg(h.id) FILTER (WHERE h.fate = 'dead') AS died,
                coalesce(array_agg(h.id), '{}') AS ids
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
                -- Also for what a handler has ended itself and nobody counted down.
                sums.ids := (SELECT b.task_ids FROM windlass.claim_task b WHERE b.token = expired.token);
                DELETE FROM windlass.claim c WHERE c.token = expired.token;
                DELETE FROM windlass.claim_task b WHERE b.token = expired.token;
                DELETE FROM windlass.completed_within w WHERE w.token = expired.token;
            END IF;
            IF sums.dead > 0 THEN
                died := died || sums.died;
                PERFORM windlass.call_back(sums.died);
            END IF;
            PERFORM windlass.call_gates(sums.ids);
            IF EXISTS (SELECT FROM windlass.claim_limit h WHERE h.token = expired.token) THEN
                over := over || array_fill(expired.token, ARRAY[cardinality(sums.ids)]);
                given_back := given_back || sums.ids;
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
    IF cardinality(over) > 0 THEN
        PERFORM windlass.give_back(over, given_back);
    END IF;
    IF returned > 0 THEN
        PERFORM windlass.wake(false);
    END IF;
    RETURN NEXT;
END
$$;

CREATE FUNCTION windlass.reserve_windows(types text[], keys text[], given uuid[], seconds double precision[], repeated boolean) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
DECLARE
    known constant uuid[] := CASE WHEN repeated THEN windlass.known_among(given) ELSE '{}' END;
    places constant integer[] := ARRAY(
        SELECT u.ordinal FROM unnest(given) WITH ORDINALITY AS u (id, ordinal) WHERE u.id <> ALL (known)
    );
BEGIN
    PERFORM windlass.take_windows(
        windlass.picked(types, places), windlass.picked(keys, places), windlass.picked(given, places),
        windlass.picked(seconds, places)
    );
END
$$;

CREATE FUNCTION windlass.retire_lanes(listed_for interval) RETURNS integer
    LANGUAGE plpgsql
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET jit TO 'off'
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
    SET lock_timeout TO '5s'
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
    IF EXISTS (SELECT FROM windlass.task_gate k WHERE k.task_id = reopened) THEN
        -- Where it has not left yet it stays.
        DELETE FROM windlass.gate_call c WHERE c.leaving = reopened;
        INSERT INTO windlass.gate_call (gate, due)
        SELECT g.gate, at FROM unnest(windlass.place_gated(ARRAY[reopened])) AS g (gate);
        PERFORM windlass.wake(false);
        RETURN true;
    END IF;
    INSERT INTO windlass.ready (lane, task_id, generation, ready_at)
    VALUES (windlass.lane_number(was.queue, was.type, was.priority, 0::smallint), was.id, was.generation + 1, at);
    PERFORM windlass.add_lanes(
        ARRAY[was.queue], ARRAY[was.type], ARRAY[was.priority]::smallint[], ARRAY[0]::smallint[]);
    PERFORM windlass.wake(false);
    RETURN true;
END
$$;

CREATE FUNCTION windlass.ruled_heads(types text[], queues text[], ageing interval, lanes bigint[], from_x bigint[], from_n bigint[], late xid8[], other_than text[]) RETURNS TABLE(lane bigint, type text, queue text, priority smallint, kind smallint, x xid8, n bigint, ready_at timestamp with time zone, limits text[])
    LANGUAGE sql STABLE
    AS $$
WITH lane_of AS MATERIALIZED (
    SELECT DISTINCT
        k.type, k.queue, k.priority, k.kind, k.lane, coalesce(r.ageing = 'Infinity', false) AS is_strict,
        CASE WHEN r.ageing < 'Infinity' THEN r.ageing * interval '1 second' ELSE ruled_heads.ageing END AS step,
        array_remove(ARRAY[
            CASE WHEN r.concurrency IS NOT NULL OR r.rate IS NOT NULL THEN 'queue ' || k.queue END,
            CASE WHEN t.concurrency IS NOT NULL OR t.rate IS NOT NULL THEN 'type ' || k.type END
        ], NULL) AS limits
    FROM windlass.lane k
    LEFT JOIN windlass.lane_rule_in_force r ON r.scope = 'queue' AND r.name = k.queue
    LEFT JOIN windlass.lane_rule_in_force t ON t.scope = 'type' AND t.name = k.type
    WHERE k.type = ANY (types) AND (queues IS NULL OR k.queue = ANY (queues))
        AND (other_than IS NULL OR k.queue <> ALL (other_than))
        AND NOT EXISTS (SELECT FROM windlass.queue q WHERE q.name = k.queue AND q.paused_at IS NOT NULL)
        AND NOT EXISTS (SELECT FROM windlass.paused_type p WHERE p.type = k.type)
), head AS (
    SELECT
        l.*, coalesce(b.x, 0)::text::xid8 AS x, coalesce(b.n, -1) AS n,
        least(h.ready_at, o.ready_at) AS ready_at,
        least(h.ready_at, o.ready_at) - l.priority * l.step AS rank
    FROM lane_of l
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
)
SELECT h.lane, h.type, h.queue, h.priority, h.kind, h.x, h.n, h.ready_at, h.limits
FROM head h
ORDER BY
    CASE
        WHEN h.is_strict THEN greatest(h.rank, max(h.rank) OVER (
            PARTITION BY h.queue ORDER BY h.priority DESC GROUPS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
        ))
        ELSE h.rank
    END,
    h.priority DESC, h.queue COLLATE "C", h.type COLLATE "C", h.kind DESC
$$;

CREATE FUNCTION windlass.settle_batch(tokens uuid[], which smallint[], task_ids uuid[], generations integer[], started_after double precision[], outcomes text[], results text[], delays double precision[], errors text[], reported boolean[], retention interval, dead_retention interval, key_retention interval, patience interval) RETURNS TABLE(ordinal integer, before boolean)
    LANGUAGE plpgsql
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET plan_cache_mode TO 'force_generic_plan'
    SET jit TO 'off'
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
    usual_day date;
BEGIN
    PERFORM set_config('lock_timeout', (extract(epoch FROM patience) * 1000)::bigint::text, true);
    which := coalesce(which, array_fill(1::smallint, ARRAY[cardinality(task_ids)]));
    generations := coalesce(generations, array_fill(1, ARRAY[cardinality(task_ids)]));
    PERFORM FROM windlass.claim c WHERE c.token = ANY (tokens) ORDER BY c.token FOR KEY SHARE;
    -- In the order of `tokens`, with NULL for a claim that is gone.
    SELECT array_agg(c.token), array_agg(c.worker_id), array_agg(c.claimed_at)
    INTO held, workers, claim_times
    FROM unnest(tokens) AS u (token)
    LEFT JOIN LATERAL (SELECT k.* FROM windlass.claim k WHERE k.token = u.token OFFSET 0) c ON true;

    IF cardinality(array_remove(held, NULL)) > 0 THEN
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

        usual_day := windlass.drop_day(at, NULL, retention, NULL, key_retention);

        IF outcomes IS NULL OR 'completed' = ANY (outcomes) THEN
            settled := windlass.complete_batch(
                held, workers, claim_times, which, task_ids, generations, started_after, outcomes, results,
                reported, at, usual_day, retention, key_retention
            );
        END IF;
        IF outcomes IS NULL AND cardinality(settled) < cardinality(task_ids) THEN
            outcomes := array_fill('completed'::text, ARRAY[cardinality(task_ids)]);
        END IF;

        IF cardinality(settled) < cardinality(task_ids) AND outcomes && '{completed,cancelled}' THEN
            WITH settlement AS MATERIALIZED (
                SELECT
                    u.task_id, u.generation, u.outcome, u.result, u.error, u.reported, u.ordinal,
                    h.token, h.worker_id, h.claimed_at,
                    h.claimed_at + u.after * interval '1 second' AS started_at
                FROM unnest(which, task_ids, generations, outcomes, started_after, results, errors, reported)
                    WITH ORDINALITY
                    AS u (which, task_id, generation, outcome, after, result, error, reported, ordinal)
                CROSS JOIN LATERAL (
                    SELECT held[u.which] AS token, workers[u.which] AS worker_id, claim_times[u.which] AS claimed_at
                ) h
                WHERE h.token IS NOT NULL AND (
                    u.outcome = 'cancelled'
                    OR u.outcome = 'completed' AND (u.generation > 1 OR u.reported)
                )
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
                FROM unnest(which, task_ids, generations, outcomes, started_after, errors, reported)
                    WITH ORDINALITY AS u (which, task_id, generation, outcome, after, error, reported, ordinal)
                CROSS JOIN LATERAL (
                    SELECT held[u.which] AS token, workers[u.which] AS worker_id, claim_times[u.which] AS claimed_at
                ) h
                WHERE h.token IS NOT NULL AND u.outcome IN ('failed', 'dead')
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
                FROM unnest(which, task_ids, generations, outcomes, started_after, delays, errors, reported)
                    WITH ORDINALITY
                    AS u (which, task_id, generation, outcome, after, delay, error, reported, ordinal)
                CROSS JOIN LATERAL (
                    SELECT held[u.which] AS token, workers[u.which] AS worker_id, claim_times[u.which] AS claimed_at
                ) h
                WHERE h.token IS NOT NULL AND u.outcome IN ('retried', 'snoozed', 'released')
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
                INSERT INTO windlass.scheduled (task_id, lane, generation, due, put_off)
                SELECT
                    r.id, windlass.lane_number(r.queue, r.type, r.priority, r.kind), r.generation, r.scheduled_for,
                    CASE WHEN r.outcome = 'snoozed'
                        THEN coalesce(r.error::jsonb ->> 'message', 'its handler snoozed it') END
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
                USING unnest(windlass.others_than(settled, cardinality(task_ids))) AS u (ordinal)
                WHERE w.token = ANY (ARRAY[tokens[which[u.ordinal]]]) AND w.task_id = ANY (ARRAY[task_ids[u.ordinal]])
                RETURNING u.ordinal
            )
            SELECT ended_here || coalesce(array_agg(c.ordinal), '{}') INTO ended_here FROM completed c;
        END IF;
        PERFORM FROM windlass.claim c WHERE c.token = ANY (held) ORDER BY c.token FOR NO KEY UPDATE;
        WITH counted AS MATERIALIZED (
            SELECT tokens[which[s.ordinal]] AS token, count(*)::integer AS tasks
            FROM unnest(ended_here) AS s (ordinal)
            GROUP BY which[s.ordinal]
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
        IF cardinality(ended_here) > 0 AND EXISTS (SELECT FROM windlass.gate_used) THEN
            PERFORM windlass.leave_gates(
                ARRAY(SELECT task_ids[s.ordinal] FROM unnest(ended_here) AS s (ordinal)), outcomes IS NULL);
        END IF;
        IF EXISTS (SELECT FROM windlass.claim_limit h WHERE h.token = ANY (held)) THEN
            PERFORM windlass.give_back(array_agg(tokens[which[s.ordinal]]), array_agg(task_ids[s.ordinal]))
            FROM unnest(ended_here) AS s (ordinal)
            HAVING count(*) > 0;
        END IF;
    END IF;

    IF cardinality(settled) < cardinality(task_ids) THEN
        RETURN QUERY
        SELECT u.ordinal::integer - 1,
            EXISTS (SELECT FROM windlass.history h WHERE h.id = u.task_id AND h.token = tokens[u.which])
            OR EXISTS (SELECT FROM windlass.dead d WHERE d.id = u.task_id AND d.token = tokens[u.which])
            OR EXISTS (SELECT FROM windlass.task t WHERE t.id = u.task_id AND t.returned_by = tokens[u.which]
                AND t.generation = u.generation + 1)
        FROM unnest(windlass.others_than(settled, cardinality(task_ids))) AS m (ordinal)
        CROSS JOIN LATERAL (
            SELECT m.ordinal, which[m.ordinal] AS which, task_ids[m.ordinal] AS task_id,
                generations[m.ordinal] AS generation
        ) u;
    END IF;
END
$$;

CREATE FUNCTION windlass.settle_failures(tokens uuid[], which smallint[], task_ids uuid[], generations integer[], started_after double precision[], outcomes text[], results text[], delays double precision[], errors text[], reported boolean[], retention interval, dead_retention interval, key_retention interval, patience interval, max_ages double precision[], calls_back boolean) RETURNS TABLE(ordinal integer, before boolean, given_up boolean)
    LANGUAGE plpgsql
    SET jit TO 'off'
    AS $$
#variable_conflict use_column
DECLARE
    asked constant text[] := outcomes;
    missed integer[];
    befores boolean[];
    late record;
    too_late integer[] := '{}';
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
            SELECT windlass.why_not_again(t, s.reason, u.delay, u.max_age) AS why
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

    -- What was put off, by a breaker or its budget, says so: a retry may be too old by then, or not be wanted.
    IF outcomes && '{snoozed}' AND errors IS NOT NULL
        AND (max_ages IS NOT NULL OR EXISTS (SELECT FROM windlass.stopped_type)) THEN
        FOR late IN
            SELECT u.task_id, u.ordinal::integer - 1 AS ordinal, tokens[coalesce(u.which, 1)] AS token,
                g.why || '; put off: ' || (u.error::jsonb ->> 'message') AS why
            FROM unnest(which, task_ids, outcomes, delays, errors, max_ages) WITH ORDINALITY
                AS u (which, task_id, outcome, delay, error, max_age, ordinal)
            JOIN windlass.task t ON t.id = ANY (ARRAY[u.task_id])
            LEFT JOIN windlass.stopped_type s ON s.type = t.type
            CROSS JOIN LATERAL (SELECT windlass.why_not_again(t, s.reason, u.delay, u.max_age) AS why) g
            WHERE u.outcome = 'snoozed' AND u.error IS NOT NULL AND t.attempts > 0 AND g.why IS NOT NULL
                AND u.ordinal - 1 <> ALL (missed)
        LOOP
            DELETE FROM windlass.scheduled w WHERE w.task_id = late.task_id;
            DELETE FROM windlass.ready r WHERE r.task_id = late.task_id;
            PERFORM windlass.bury_tasks(ARRAY[late.task_id], late.why, late.token, dead_retention, key_retention);
            too_late := too_late || late.ordinal;
        END LOOP;
    END IF;

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
    WHERE u.asked = 'retried' AND u.outcome = 'dead' AND u.ordinal - 1 <> ALL (missed)
    UNION ALL
    SELECT u.ordinal, false, true FROM unnest(too_late) AS u (ordinal);
END
$$;

CREATE FUNCTION windlass.settle_tasks(tokens uuid[], task_ids uuid[], generations integer[], outcomes text[], started_after double precision[], results text[], delays double precision[], errors text[], reported boolean[], retention interval, dead_retention interval, key_retention interval, patience interval) RETURNS TABLE(ordinal integer, before boolean)
    LANGUAGE plpgsql
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET jit TO 'off'
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

CREATE FUNCTION windlass.shown(value jsonb) RETURNS text
    LANGUAGE plpgsql STABLE
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
DECLARE
    kind constant text := jsonb_typeof(value);
    said text;
BEGIN
    IF kind = 'string' THEN
        said := windlass.quoted(left(value #>> '{}', 101));
    ELSIF kind IN ('array', 'object') AND pg_column_size(value) > 1000 THEN
        said := format('(%s of %s bytes)', kind, pg_column_size(value));  -- its text may have gigabytes
    ELSE
        said := value::text;
    END IF;
    RETURN CASE WHEN length(said) > 100 THEN left(said, 100) || '…' ELSE said END;
END
$$;

CREATE FUNCTION windlass.start_tasks(tokens uuid[], task_ids uuid[], generations integer[], started_after double precision[]) RETURNS SETOF uuid
    LANGUAGE plpgsql
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET jit TO 'off'
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

CREATE FUNCTION windlass.take_all_waiting(wanted uuid[], untried boolean) RETURNS uuid[]
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET enable_material TO 'off'
    SET jit TO 'off'
    AS $$
DECLARE
    waiting uuid[];
    taken uuid[];
BEGIN
    waiting := ARRAY(
        SELECT s.task_id FROM windlass.scheduled s WHERE s.task_id = ANY (wanted)
        ORDER BY s.task_id FOR UPDATE SKIP LOCKED
    );
    waiting := waiting || ARRAY(
        SELECT r.task_id FROM windlass.ready r WHERE r.task_id = ANY (wanted)
        ORDER BY r.task_id FOR UPDATE SKIP LOCKED
    );
    IF EXISTS (SELECT FROM windlass.gate_used) THEN
        waiting := waiting || ARRAY(
            SELECT e.task_id FROM windlass.gate_entry e WHERE e.task_id = ANY (wanted) AND NOT e.is_open
            ORDER BY e.task_id FOR UPDATE SKIP LOCKED
        );
    END IF;
    taken := ARRAY(
        SELECT t.id FROM windlass.task t WHERE t.id = ANY (waiting) AND (NOT untried OR t.attempts = 0)
        ORDER BY t.id FOR UPDATE SKIP LOCKED
    );
    DELETE FROM windlass.scheduled s WHERE s.task_id = ANY (taken);
    DELETE FROM windlass.ready r WHERE r.task_id = ANY (taken);
    DELETE FROM windlass.gate_entry e WHERE e.task_id = ANY (taken) AND NOT e.is_open;
    RETURN taken;
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
        DELETE FROM windlass.gate_entry e WHERE e.task_id = waiting AND NOT e.is_open;
        IF FOUND THEN
            RETURN true;
        END IF;
        IF NOT EXISTS (SELECT FROM windlass.scheduled s WHERE s.task_id = waiting)
            AND NOT EXISTS (SELECT FROM windlass.ready r WHERE r.task_id = waiting)
            AND NOT EXISTS (SELECT FROM windlass.gate_entry e WHERE e.task_id = waiting AND NOT e.is_open) THEN
            RETURN false;
        END IF;
    END LOOP;
    RAISE EXCEPTION 'task % moved between its places a hundred times', waiting
        USING ERRCODE = 'serialization_failure';
END
$$;

CREATE FUNCTION windlass.take_windows(types text[], keys text[], given uuid[], seconds double precision[]) RETURNS uuid[]
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET jit TO 'off'
    AS $$
#variable_conflict use_column
DECLARE
    began constant timestamptz := windlass.clock();
    named uuid[];
    moving uuid[];
    waiting uuid[] := '{}';
    waited interval;
BEGIN
    named := ARRAY(
        SELECT d.task_id
        FROM unnest(types, keys) WITH ORDINALITY AS u (type, key, ordinal)
        LEFT JOIN windlass.dedupe d
            ON d.type = u.type AND d.key = u.key AND d.until > began AND left(u.key, 1) <> 'd'
        ORDER BY u.ordinal
    );
    IF array_position(named, NULL) IS NULL THEN
        RETURN named;
    END IF;
    WITH taken AS (
        INSERT INTO windlass.dedupe AS d (type, key, task_id, until)
        SELECT u.type, u.key, u.id, began + u.seconds * interval '1 second'
        FROM unnest(types, keys, given, seconds, named) AS u (type, key, id, seconds, named)
        WHERE u.named IS NULL
        ORDER BY u.type COLLATE "C", u.key COLLATE "C"
        -- Whether it is over is asked once it is locked.
        ON CONFLICT (type, key) DO UPDATE SET (task_id, until) = (
            SELECT
                CASE WHEN n.is_over AND left(d.key, 1) <> 'd' THEN excluded.task_id ELSE d.task_id END,
                CASE WHEN n.is_over THEN excluded.until + (n.at - began) ELSE d.until END
            FROM (
                SELECT c.at, d.until <= c.at OR left(d.key, 1) = 'd' AS is_over
                FROM (SELECT windlass.clock() AS at OFFSET 0) c
                OFFSET 0  -- worked out once
            ) n
        )
        RETURNING d.type, d.key, d.task_id
    )
    SELECT array_agg(coalesce(u.named, t.task_id) ORDER BY u.ordinal) INTO named
    FROM unnest(types, keys, named) WITH ORDINALITY AS u (type, key, named, ordinal)
    LEFT JOIN taken t ON t.type = u.type AND t.key = u.key;
    waited := windlass.clock() - began;
    IF waited > interval '10 milliseconds' THEN
        -- Whoever it waited for may have been rolled back: what was added begins when it is there.
        UPDATE windlass.dedupe d
        SET until = d.until + waited
        FROM unnest(types, keys, given, seconds) AS u (type, key, id, seconds)
        WHERE d.type = u.type AND d.key = u.key AND d.task_id = u.id
            AND d.until = began + u.seconds * interval '1 second';
    END IF;

    moving := ARRAY(
        SELECT u.named
        FROM unnest(keys, given, named) AS u (key, id, named)
        WHERE left(u.key, 1) = 'd' AND u.named <> u.id
    );
    IF moving = '{}' THEN
        RETURN named;
    END IF;
    FOR turn IN 1..101 LOOP
        waiting := waiting || ARRAY(
            SELECT s.task_id
            FROM windlass.scheduled s
            WHERE s.task_id = ANY (moving) AND s.task_id <> ALL (waiting) AND s.generation = 1
            ORDER BY s.task_id
            FOR UPDATE
        );
        -- Whoever changes a task puts it into its place anew.
        EXIT WHEN NOT EXISTS (
            SELECT
            FROM windlass.scheduled s
            WHERE s.task_id = ANY (moving) AND s.task_id <> ALL (waiting) AND s.generation = 1
        );
        IF turn > 100 THEN
            RAISE EXCEPTION 'tasks % were changed a hundred times', moving USING ERRCODE = 'serialization_failure';
        END IF;
    END LOOP;
    UPDATE windlass.dedupe d
    SET task_id = u.id
    FROM unnest(types, keys, given, named) AS u (type, key, id, named)
    WHERE d.type = u.type AND d.key = u.key AND left(u.key, 1) = 'd' AND u.named <> ALL (waiting);
    RETURN ARRAY(
        SELECT CASE WHEN left(u.key, 1) = 'd' AND u.named <> ALL (waiting) THEN u.id ELSE u.named END
        FROM unnest(keys, given, named) WITH ORDINALITY AS u (key, id, named, ordinal)
        ORDER BY u.ordinal
    );
END
$$;

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
    payload jsonb,
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

CREATE FUNCTION windlass.tried_since(task windlass.task) RETURNS timestamp with time zone
    LANGUAGE sql STABLE
    AS $$
SELECT CASE
    WHEN count(*) <= (task.attempts > 0)::integer THEN task.created_at
    WHEN task.attempts = 0 THEN windlass.clock()
    ELSE (array_agg(coalesce(a.started_at, a.ended_at) ORDER BY a.generation DESC))[1]
END
FROM windlass.attempt a
WHERE a.task_id = task.id AND a.attempt = 1
$$;

CREATE FUNCTION windlass.trimmed(part jsonb) RETURNS jsonb
    LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
BEGIN
    CASE jsonb_typeof(part)
        WHEN 'number' THEN
            RETURN to_jsonb(trim_scale(part::numeric));
        WHEN 'array' THEN
            RETURN (
                SELECT coalesce(jsonb_agg(windlass.trimmed(e.item) ORDER BY e.ordinal), '[]')
                FROM jsonb_array_elements(part) WITH ORDINALITY AS e (item, ordinal)
            );
        WHEN 'object' THEN
            RETURN (
                SELECT coalesce(jsonb_object_agg(e.name, windlass.trimmed(e.item)), '{}')
                FROM jsonb_each(part) AS e (name, item)
            );
        ELSE
            RETURN part;
    END CASE;
END
$$;

CREATE FUNCTION windlass.unknown_types() RETURNS SETOF text
    LANGUAGE sql STABLE
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    SET jit TO 'off'
    AS $$
SELECT DISTINCT l.type
FROM windlass.lane l
CROSS JOIN LATERAL (SELECT FROM windlass.ready r WHERE r.lane = l.lane LIMIT 1) r
WHERE NOT EXISTS (SELECT FROM windlass.worker w WHERE l.type = ANY (w.types))
    AND NOT EXISTS (SELECT FROM windlass.queue q WHERE q.name = l.queue AND q.paused_at IS NOT NULL)
    AND NOT EXISTS (SELECT FROM windlass.paused_type p WHERE p.type = l.type)
ORDER BY l.type
$$;

CREATE FUNCTION windlass.wake(always boolean) RETURNS void
    LANGUAGE sql
    AS $$
SELECT pg_notify('windlass.wake', '')
WHERE always OR EXISTS (SELECT FROM windlass.worker_pulse WHERE idle)
$$;

CREATE FUNCTION windlass.why_not_again(task windlass.task, stopped text, delay double precision, max_age double precision) RETURNS text
    LANGUAGE sql
    AS $$
SELECT CASE
    WHEN stopped IS NOT NULL THEN 'retries of this type are stopped: ' || stopped
    WHEN windlass.clock() + coalesce(delay, 0) * interval '1 second'
        > windlass.tried_since(task) + max_age * interval '1 second'
        THEN format('its next attempt would begin more than %s s after it was enqueued', max_age)
END
$$;

CREATE FUNCTION windlass.why_stopped(stopped text) RETURNS text
    LANGUAGE sql STABLE
    AS $$
SELECT 'retries of this type are stopped: ' || s.reason FROM windlass.stopped_type s WHERE s.type = stopped
$$;

CREATE FUNCTION windlass.window_key(kind text, name text, payload text) RETURNS text
    LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
DECLARE
    said text;
BEGIN
    IF kind IS NULL OR name IS NOT NULL OR kind <> 'unique_for' THEN
        RETURN left(kind, 1) || coalesce(':' || name, '');
    END IF;
    said := payload::jsonb::text;
    IF said ~ '[.][0-9]*0[],}]' THEN  -- it may be a number that can be written shorter
        said := windlass.trimmed(said::jsonb)::text;
    END IF;
    RETURN 'u#' || encode(sha256(convert_to(said, 'UTF8')), 'hex');
END
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

CREATE TABLE windlass.breaker (
    name text NOT NULL,
    epoch bigint NOT NULL,
    half_open_at timestamp with time zone,
    opened_for interval,
    prober uuid,
    prober_until timestamp with time zone,
    CONSTRAINT breaker_check CHECK (((opened_for IS NULL) = (half_open_at IS NULL)))
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

CREATE TABLE windlass.claim_limit (
    token uuid NOT NULL,
    scope text NOT NULL,
    name text NOT NULL,
    task_ids uuid[],
    remaining integer NOT NULL,
    CONSTRAINT claim_limit_remaining_check CHECK ((remaining > 0))
)
WITH (fillfactor='50', autovacuum_vacuum_scale_factor='0.05', autovacuum_vacuum_threshold='1000');
ALTER TABLE ONLY windlass.claim_limit ALTER COLUMN task_ids SET STORAGE EXTERNAL;

CREATE TABLE windlass.claim_task (
    token uuid NOT NULL,
    task_ids uuid[] NOT NULL,
    generations integer[] NOT NULL
)
WITH (autovacuum_vacuum_scale_factor='0.05', autovacuum_vacuum_threshold='1000');
ALTER TABLE ONLY windlass.claim_task ALTER COLUMN task_ids SET STORAGE EXTERNAL;
ALTER TABLE ONLY windlass.claim_task ALTER COLUMN generations SET STORAGE EXTERNAL;

CREATE TABLE windlass.completed_within (
    token uuid NOT NULL,
    task_id uuid NOT NULL
);

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
    payload jsonb,
    tags text[],
    result jsonb,
    last_error text,
    errors jsonb,
    CONSTRAINT dead_status_check CHECK ((status = ANY (ARRAY['failed'::windlass.task_status, 'dead'::windlass.task_status])))
);

CREATE TABLE windlass.dedupe (
    type text NOT NULL,
    key text NOT NULL,
    task_id uuid NOT NULL,
    until timestamp with time zone NOT NULL
)
WITH (autovacuum_vacuum_scale_factor='0.05', autovacuum_vacuum_threshold='1000');

CREATE TABLE windlass.expiry (
    task_id uuid NOT NULL,
    expires_at timestamp with time zone NOT NULL
);

CREATE TABLE windlass.gate (
    gate bigint NOT NULL,
    type text,
    name text NOT NULL,
    held integer DEFAULT 0 NOT NULL,
    tokens double precision,
    counted_at timestamp with time zone,
    called_for timestamp with time zone,
    from_x xid8 DEFAULT '0'::xid8 NOT NULL,
    from_n bigint DEFAULT '-1'::integer NOT NULL,
    CONSTRAINT gate_held_check CHECK ((held >= 0))
)
WITH (fillfactor='50', autovacuum_vacuum_scale_factor='0.05', autovacuum_vacuum_threshold='1000');

CREATE TABLE windlass.gate_call (
    gate bigint NOT NULL,
    due timestamp with time zone NOT NULL,
    leaving uuid
)
WITH (autovacuum_vacuum_scale_factor='0.05', autovacuum_vacuum_threshold='1000');

CREATE TABLE windlass.gate_entry (
    gate bigint NOT NULL,
    x xid8 DEFAULT pg_current_xact_id() NOT NULL,
    n bigint NOT NULL,
    task_id uuid NOT NULL,
    is_open boolean DEFAULT false NOT NULL
)
WITH (fillfactor='60', autovacuum_vacuum_scale_factor='0.05', autovacuum_vacuum_threshold='1000');

ALTER TABLE windlass.gate_entry ALTER COLUMN n ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME windlass.gate_entry_n_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 100
);

CREATE TABLE windlass.gate_used (
    since timestamp with time zone NOT NULL
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
    payload jsonb,
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

CREATE TABLE windlass.lane_rule (
    scope text NOT NULL,
    name text NOT NULL,
    by_operator boolean NOT NULL,
    concurrency integer,
    rate double precision,
    burst double precision,
    ageing double precision,
    weight integer,
    changed_at timestamp with time zone NOT NULL,
    CONSTRAINT lane_rule_ageing_check CHECK ((ageing >= (0)::double precision)),
    CONSTRAINT lane_rule_burst_check CHECK ((burst >= (1)::double precision)),
    CONSTRAINT lane_rule_check CHECK (((rate IS NULL) = (burst IS NULL))),
    CONSTRAINT lane_rule_check1 CHECK (((scope = 'queue'::text) OR ((ageing IS NULL) AND (weight IS NULL)))),
    CONSTRAINT lane_rule_concurrency_check CHECK ((concurrency > 0)),
    CONSTRAINT lane_rule_rate_check CHECK ((rate > (0)::double precision)),
    CONSTRAINT lane_rule_scope_check CHECK ((scope = ANY (ARRAY['queue'::text, 'type'::text]))),
    CONSTRAINT lane_rule_weight_check CHECK ((weight > 0))
);

CREATE VIEW windlass.lane_rule_in_force AS
 SELECT DISTINCT ON (scope, name) scope,
    name,
    by_operator,
    concurrency,
    rate,
    burst,
    ageing,
    weight,
    changed_at
   FROM windlass.lane_rule r
  ORDER BY scope, name, by_operator DESC;

CREATE TABLE windlass.large_payload (
    task_id uuid NOT NULL,
    payload text NOT NULL,
    CONSTRAINT large_payload_payload_check CHECK ((jsonb_typeof((payload)::jsonb) = 'object'::text))
);

CREATE TABLE windlass.leadership (
    seat boolean DEFAULT true NOT NULL,
    holder uuid,
    term bigint NOT NULL,
    expires_at timestamp with time zone NOT NULL,
    CONSTRAINT leadership_seat_check CHECK (seat)
);

CREATE TABLE windlass.limit_use (
    scope text NOT NULL,
    name text NOT NULL,
    version bigint NOT NULL,
    used integer NOT NULL,
    tokens double precision,
    counted_at timestamp with time zone NOT NULL,
    changes smallint DEFAULT 0 NOT NULL
)
WITH (fillfactor='20', autovacuum_vacuum_scale_factor='0.05', autovacuum_vacuum_threshold='1000');

CREATE TABLE windlass.migration (
    number integer NOT NULL,
    name text NOT NULL,
    applied_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL
);

CREATE TABLE windlass.paused_type (
    type text NOT NULL,
    paused_at timestamp with time zone NOT NULL
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

CREATE TABLE windlass.replay (
    task_id uuid NOT NULL,
    ancestor uuid NOT NULL,
    generation integer NOT NULL,
    depth integer NOT NULL,
    replayed_at timestamp with time zone NOT NULL,
    CONSTRAINT replay_depth_check CHECK ((depth > 0))
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

CREATE TABLE windlass.schedule (
    name text NOT NULL,
    owner text NOT NULL,
    cron text,
    every interval,
    timezone text NOT NULL,
    task jsonb NOT NULL,
    overlap text NOT NULL,
    catch_up integer NOT NULL,
    jitter interval NOT NULL,
    revision bigint DEFAULT 1 NOT NULL,
    registered_at timestamp with time zone NOT NULL,
    decided_until timestamp with time zone NOT NULL,
    settled timestamp with time zone[] DEFAULT '{}'::timestamp with time zone[] NOT NULL,
    look_at timestamp with time zone NOT NULL,
    paused_at timestamp with time zone,
    resumed_at timestamp with time zone,
    retired_at timestamp with time zone,
    is_active boolean GENERATED ALWAYS AS (((retired_at IS NULL) AND ((paused_at IS NULL) OR (resumed_at IS NOT NULL)))) STORED NOT NULL,
    CONSTRAINT schedule_catch_up_check CHECK ((catch_up >= 0)),
    CONSTRAINT schedule_check CHECK (((resumed_at IS NULL) OR (paused_at IS NOT NULL))),
    CONSTRAINT schedule_check1 CHECK (((cron IS NULL) <> (every IS NULL))),
    CONSTRAINT schedule_overlap_check CHECK ((overlap = ANY (ARRAY['skip'::text, 'queue'::text, 'allow'::text])))
);

CREATE TABLE windlass.scheduled (
    task_id uuid NOT NULL,
    lane bigint NOT NULL,
    generation integer NOT NULL,
    due timestamp with time zone NOT NULL,
    put_off text
)
WITH (autovacuum_vacuum_scale_factor='0.05', autovacuum_vacuum_threshold='1000');

CREATE TABLE windlass.setting (
    only_row boolean DEFAULT true NOT NULL,
    retention interval DEFAULT '7 days'::interval NOT NULL,
    key_retention interval DEFAULT '7 days'::interval NOT NULL,
    max_payload_bytes integer DEFAULT 1048576 NOT NULL,
    CONSTRAINT setting_only_row_check CHECK (only_row)
);

CREATE TABLE windlass.slot (
    id bigint NOT NULL,
    schedule text NOT NULL,
    slot_at timestamp with time zone NOT NULL,
    on_request boolean DEFAULT false NOT NULL,
    state text NOT NULL,
    decided_at timestamp with time zone NOT NULL,
    task_id uuid,
    reason text,
    first_at timestamp with time zone,
    slots bigint DEFAULT 1 NOT NULL,
    CONSTRAINT slot_check CHECK (((task_id IS NULL) = (state <> 'fired'::text))),
    CONSTRAINT slot_state_check CHECK ((state = ANY (ARRAY['fired'::text, 'skipped'::text, 'waiting'::text])))
);

ALTER TABLE windlass.slot ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME windlass.slot_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE windlass.stopped_type (
    type text NOT NULL,
    reason text NOT NULL,
    stopped_at timestamp with time zone NOT NULL
);

CREATE TABLE windlass.task_gate (
    task_id uuid NOT NULL,
    ordering_key text,
    order_gate bigint,
    limit_type text,
    limit_value text,
    limit_gate bigint,
    limit_by jsonb,
    keeps_key boolean NOT NULL,
    CONSTRAINT task_gate_check CHECK (((ordering_key IS NULL) = (order_gate IS NULL))),
    CONSTRAINT task_gate_check1 CHECK ((((limit_gate IS NULL) = (limit_value IS NULL)) AND ((limit_gate IS NULL) = (limit_by IS NULL)))),
    CONSTRAINT task_gate_check2 CHECK (((ordering_key IS NOT NULL) OR (limit_gate IS NOT NULL)))
);

CREATE TABLE windlass.task_tag (
    tag text NOT NULL,
    task_id uuid NOT NULL
);

CREATE TABLE windlass.task_type (
    name text NOT NULL,
    queue text NOT NULL,
    priority smallint NOT NULL,
    max_attempts smallint NOT NULL,
    retention_seconds integer,
    registered_at timestamp with time zone NOT NULL,
    max_age double precision,
    on_success jsonb,
    on_failure jsonb,
    limit_by jsonb,
    CONSTRAINT task_type_max_attempts_check CHECK ((max_attempts > 0)),
    CONSTRAINT task_type_priority_check CHECK (((priority >= 0) AND (priority <= 100)))
);

CREATE VIEW windlass.tasks AS
 SELECT t.id,
    t.type,
    t.queue,
    COALESCE(t.payload, ( SELECT (l.payload)::jsonb AS payload
           FROM windlass.large_payload l
          WHERE (l.task_id = t.id))) AS payload,
    (
        CASE
            WHEN (r.task_id IS NOT NULL) THEN 'pending'::text
            WHEN (s.task_id IS NOT NULL) THEN 'scheduled'::text
            WHEN (e.task_id IS NOT NULL) THEN (windlass.gate_status(t.id))::text
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
    t.generation,
    (a.error ->> 'class'::text) AS error_class,
    ( SELECT p.ancestor
           FROM windlass.replay p
          WHERE (p.task_id = t.id)) AS replay_of
   FROM ((((((windlass.task t
     LEFT JOIN windlass.ready r ON ((r.task_id = t.id)))
     LEFT JOIN windlass.scheduled s ON ((s.task_id = t.id)))
     LEFT JOIN windlass.gate_entry e ON (((e.task_id = t.id) AND (NOT e.is_open))))
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
    COALESCE(h.payload, ( SELECT (l.payload)::jsonb AS payload
           FROM windlass.large_payload l
          WHERE (l.task_id = h.id))) AS payload,
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
    h.generation,
    ((h.errors -> '-1'::integer) ->> 'class'::text) AS error_class,
    ( SELECT p.ancestor
           FROM windlass.replay p
          WHERE (p.task_id = h.id)) AS replay_of
   FROM windlass.history h
UNION ALL
 SELECT d.id,
    d.type,
    d.queue,
    COALESCE(d.payload, ( SELECT (l.payload)::jsonb AS payload
           FROM windlass.large_payload l
          WHERE (l.task_id = d.id))) AS payload,
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
    d.generation,
    ((d.errors -> '-1'::integer) ->> 'class'::text) AS error_class,
    ( SELECT p.ancestor
           FROM windlass.replay p
          WHERE (p.task_id = d.id)) AS replay_of
   FROM windlass.dead d;

CREATE TABLE windlass.value_rule (
    type text NOT NULL,
    value text,
    by_operator boolean NOT NULL,
    concurrency integer,
    rate double precision,
    burst double precision,
    weight integer,
    changed_at timestamp with time zone NOT NULL,
    CONSTRAINT value_rule_burst_check CHECK ((burst >= (1)::double precision)),
    CONSTRAINT value_rule_check CHECK (((rate IS NULL) = (burst IS NULL))),
    CONSTRAINT value_rule_concurrency_check CHECK ((concurrency > 0)),
    CONSTRAINT value_rule_rate_check CHECK ((rate > (0)::double precision)),
    CONSTRAINT value_rule_weight_check CHECK ((weight > 0))
);

CREATE TABLE windlass.value_rule_change (
    type text NOT NULL,
    changed_at timestamp with time zone NOT NULL,
    seen_before xid8
);

CREATE TABLE windlass.worker (
    id uuid NOT NULL,
    host text NOT NULL,
    pid integer NOT NULL,
    version text NOT NULL,
    capacity integer NOT NULL,
    types text[] NOT NULL,
    queues text[],
    started_at timestamp with time zone NOT NULL,
    defaults jsonb,
    paused_at timestamp with time zone,
    drained_at timestamp with time zone
);

CREATE TABLE windlass.worker_pulse (
    worker_id uuid NOT NULL,
    heartbeat_at timestamp with time zone NOT NULL,
    expires_at timestamp with time zone NOT NULL,
    running integer NOT NULL,
    idle boolean NOT NULL,
    breakers jsonb,
    full_queues text[]
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
    COALESCE(((l.holder = w.id) AND (l.expires_at > windlass.clock())), false) AS leader,
    p.breakers,
    w.paused_at,
    w.drained_at,
    p.full_queues
   FROM ((windlass.worker w
     JOIN windlass.worker_pulse p ON ((p.worker_id = w.id)))
     CROSS JOIN windlass.leadership l);

ALTER TABLE ONLY windlass.attempt
    ADD CONSTRAINT attempt_pkey PRIMARY KEY (task_id, generation);

ALTER TABLE ONLY windlass.breaker
    ADD CONSTRAINT breaker_pkey PRIMARY KEY (name);

ALTER TABLE ONLY windlass.cancel_request
    ADD CONSTRAINT cancel_request_pkey PRIMARY KEY (task_id);

ALTER TABLE ONLY windlass.claim
    ADD CONSTRAINT claim_pkey PRIMARY KEY (token);

ALTER TABLE ONLY windlass.claim_task
    ADD CONSTRAINT claim_task_pkey PRIMARY KEY (token);

ALTER TABLE ONLY windlass.completed_within
    ADD CONSTRAINT completed_within_pkey PRIMARY KEY (token, task_id);

ALTER TABLE ONLY windlass.dead
    ADD CONSTRAINT dead_pkey PRIMARY KEY (id);

ALTER TABLE ONLY windlass.dedupe
    ADD CONSTRAINT dedupe_pkey PRIMARY KEY (type, key);

ALTER TABLE ONLY windlass.expiry
    ADD CONSTRAINT expiry_pkey PRIMARY KEY (task_id);

ALTER TABLE ONLY windlass.gate
    ADD CONSTRAINT gate_pkey PRIMARY KEY (gate);

ALTER TABLE ONLY windlass.idempotency
    ADD CONSTRAINT idempotency_pkey PRIMARY KEY (type, key);

ALTER TABLE ONLY windlass.lane_rule
    ADD CONSTRAINT lane_rule_pkey PRIMARY KEY (scope, name, by_operator);

ALTER TABLE ONLY windlass.large_payload
    ADD CONSTRAINT large_payload_pkey PRIMARY KEY (task_id);

ALTER TABLE ONLY windlass.leadership
    ADD CONSTRAINT leadership_pkey PRIMARY KEY (seat);

ALTER TABLE ONLY windlass.limit_use
    ADD CONSTRAINT limit_use_pkey PRIMARY KEY (scope, name, version);

ALTER TABLE ONLY windlass.migration
    ADD CONSTRAINT migration_pkey PRIMARY KEY (number);

ALTER TABLE ONLY windlass.paused_type
    ADD CONSTRAINT paused_type_pkey PRIMARY KEY (type);

ALTER TABLE ONLY windlass.queue
    ADD CONSTRAINT queue_pkey PRIMARY KEY (name);

ALTER TABLE ONLY windlass.replay
    ADD CONSTRAINT replay_pkey PRIMARY KEY (task_id);

ALTER TABLE ONLY windlass.resting_lane
    ADD CONSTRAINT resting_lane_pkey PRIMARY KEY (lane);

ALTER TABLE ONLY windlass.running
    ADD CONSTRAINT running_pkey PRIMARY KEY (task_id);

ALTER TABLE ONLY windlass.schedule
    ADD CONSTRAINT schedule_pkey PRIMARY KEY (name);

ALTER TABLE ONLY windlass.scheduled
    ADD CONSTRAINT scheduled_pkey PRIMARY KEY (task_id);

ALTER TABLE ONLY windlass.setting
    ADD CONSTRAINT setting_pkey PRIMARY KEY (only_row);

ALTER TABLE ONLY windlass.slot
    ADD CONSTRAINT slot_pkey PRIMARY KEY (id);

ALTER TABLE ONLY windlass.stopped_type
    ADD CONSTRAINT stopped_type_pkey PRIMARY KEY (type);

ALTER TABLE ONLY windlass.task_gate
    ADD CONSTRAINT task_gate_pkey PRIMARY KEY (task_id);

ALTER TABLE ONLY windlass.task
    ADD CONSTRAINT task_pkey PRIMARY KEY (id);

ALTER TABLE ONLY windlass.task_tag
    ADD CONSTRAINT task_tag_pkey PRIMARY KEY (tag, task_id);

ALTER TABLE ONLY windlass.task_type
    ADD CONSTRAINT task_type_pkey PRIMARY KEY (name);

ALTER TABLE ONLY windlass.value_rule
    ADD CONSTRAINT value_rule_type_value_by_operator_key UNIQUE NULLS NOT DISTINCT (type, value, by_operator);

ALTER TABLE ONLY windlass.worker
    ADD CONSTRAINT worker_pkey PRIMARY KEY (id);

ALTER TABLE ONLY windlass.worker_pulse
    ADD CONSTRAINT worker_pulse_pkey PRIMARY KEY (worker_id);

CREATE INDEX claim_limit_token ON windlass.claim_limit USING btree (token);

CREATE INDEX dead_drop_on ON windlass.dead USING btree (drop_on);

CREATE INDEX dead_ended ON windlass.dead USING btree (completed_at, id) INCLUDE (queue);

CREATE INDEX dead_of_queue ON windlass.dead USING btree (queue, completed_at, id);

CREATE INDEX dead_status ON windlass.dead USING btree (status, id);

CREATE INDEX dedupe_until ON windlass.dedupe USING btree (until);

CREATE INDEX expiry_time ON windlass.expiry USING btree (expires_at);

CREATE INDEX gate_call_due ON windlass.gate_call USING btree (due);

CREATE INDEX gate_call_leaving ON windlass.gate_call USING btree (leaving) WHERE (leaving IS NOT NULL);

CREATE INDEX gate_call_left ON windlass.gate_call USING btree (gate) WHERE (leaving IS NOT NULL);

CREATE INDEX gate_entry_order ON windlass.gate_entry USING btree (gate, x, n);

CREATE INDEX gate_entry_task ON windlass.gate_entry USING btree (task_id);

CREATE INDEX lane_number ON windlass.lane USING btree (lane);

CREATE INDEX lane_type ON windlass.lane USING btree (type);

CREATE INDEX ready_order ON windlass.ready USING btree (lane, x, n);

CREATE UNIQUE INDEX ready_task ON windlass.ready USING btree (task_id);

CREATE INDEX replay_ancestor ON windlass.replay USING btree (ancestor, generation);

CREATE INDEX scheduled_due ON windlass.scheduled USING btree (due, task_id);

CREATE INDEX scheduled_lane ON windlass.scheduled USING btree (lane, task_id);

CREATE UNIQUE INDEX slot_once ON windlass.slot USING btree (schedule, slot_at) WHERE (NOT on_request);

CREATE INDEX slot_order ON windlass.slot USING btree (schedule, slot_at DESC);

CREATE INDEX slot_waiting ON windlass.slot USING btree (schedule) WHERE (state = 'waiting'::text);

CREATE TRIGGER dead_is_final BEFORE DELETE OR UPDATE ON windlass.dead FOR EACH ROW EXECUTE FUNCTION windlass.refuse_change();

CREATE TRIGGER generation_never_falls BEFORE UPDATE ON windlass.task FOR EACH ROW WHEN (((new.generation < old.generation) OR (new.id <> old.id))) EXECUTE FUNCTION windlass.refuse_older_generation();

CREATE TRIGGER history_is_final BEFORE DELETE OR UPDATE ON windlass.history FOR EACH ROW EXECUTE FUNCTION windlass.refuse_change();

ALTER TABLE ONLY windlass.slot
    ADD CONSTRAINT slot_schedule_fkey FOREIGN KEY (schedule) REFERENCES windlass.schedule(name) ON DELETE CASCADE;
