-- Windows: a call that asks for a task again within some time is answered with the one of before.
-- Tasks that were enqueued without one are written and read as before.

-- Which task a window names, and until when. `key` is its kind ('u', 't' or 'd') and what has to be equal. That of a
-- debounce is over when its task waits no longer; `until` is only when it is worth while to look.
CREATE TABLE windlass.dedupe (
    type text NOT NULL,
    key text NOT NULL,
    task_id uuid NOT NULL,
    until timestamptz NOT NULL,
    PRIMARY KEY (type, key)
) WITH (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 1000);
CREATE INDEX dedupe_until ON windlass.dedupe (until);

-- Who may read tasks may read this. It is written by the functions below.
DO $$
DECLARE
    granted record;
BEGIN
    FOR granted IN
        SELECT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE a.grantee::regrole::text END AS role
        FROM pg_class c
        CROSS JOIN aclexplode(c.relacl) a
        WHERE c.oid = 'windlass.task'::regclass AND a.grantee <> c.relowner AND a.privilege_type = 'SELECT'
    LOOP
        EXECUTE format('GRANT SELECT ON windlass.dedupe TO %s', granted.role);
    END LOOP;
END
$$;

-- trimmed: the same value with numbers that are equal written alike: as jsonb 1.0 is 1, but its text is another.
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

-- window_key: what has to be equal for two calls to be of one window, as a text.
-- A payload is told from another by a hash that nobody can bring about twice.
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

-- checked_window: the window that a task is asked for with, as {kind, seconds, key}; NULL if there is none.
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

-- known_among: which of these tasks there are, live or ended.
CREATE FUNCTION windlass.known_among(task_ids uuid[]) RETURNS uuid[]
LANGUAGE sql STABLE
SET search_path TO 'pg_catalog', 'pg_temp'
SET enable_seqscan = off
SET jit = off
AS $$
SELECT coalesce(array_agg(u.id), '{}')
FROM unnest(task_ids) AS u (id)
WHERE EXISTS (SELECT FROM windlass.task t WHERE t.id = u.id)
    OR EXISTS (SELECT FROM windlass.history h WHERE h.id = u.id)
    OR EXISTS (SELECT FROM windlass.dead d WHERE d.id = u.id)
$$;

-- picked: what an array holds in these places, in their order.
CREATE FUNCTION windlass.picked(given anyarray, places integer[]) RETURNS anyarray
LANGUAGE sql IMMUTABLE
AS $$
SELECT CASE WHEN given IS NOT NULL THEN ARRAY(
    SELECT given[u.place] FROM unnest(places) WITH ORDINALITY AS u (place, ordinal) ORDER BY u.ordinal
) END
$$;

-- take_windows: say which task each window names, each given once: one of before, or the one that is given, which is
-- to be added then. Waits for whoever is about to open one of them, in the order of type and key; what is open already
-- is only looked at, unless it is a debounce. Of that the task is locked in its place if it is one of before: it waits.
CREATE FUNCTION windlass.take_windows(types text[], keys text[], given uuid[], seconds float8[]) RETURNS uuid[]
LANGUAGE plpgsql
SET search_path TO 'pg_catalog', 'pg_temp'
SET enable_hashjoin = off
SET enable_mergejoin = off
SET enable_seqscan = off
SET enable_bitmapscan = off
SET jit = off
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

-- reserve_windows: take windows in sorted order, each given once, before a call in several statements uses them.
CREATE FUNCTION windlass.reserve_windows(
    types text[], keys text[], given uuid[], seconds float8[], repeated boolean
) RETURNS void
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

-- replace_waiting: give tasks another payload, and another time from now on. They wait for their time, and this
-- transaction has locked them in their place.
CREATE FUNCTION windlass.replace_waiting(waiting uuid[], payloads text[], seconds float8[]) RETURNS void
LANGUAGE plpgsql
SET search_path TO 'pg_catalog', 'pg_temp'
SET enable_hashjoin = off
SET enable_mergejoin = off
SET enable_seqscan = off
SET enable_bitmapscan = off
SET jit = off
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

-- enqueue_windowed: the same as enqueue_expiring, of tasks some of which have a window (`window_kinds`: unique_for,
-- throttle or debounce). Those whose window names another task are not added; returned are these, and those that
-- enqueue_tasks returns. It runs with the rights of its owner, since a debounce changes a task.
CREATE FUNCTION windlass.enqueue_windowed(task_ids uuid[], types text[], queues text[], priorities smallint[], payloads text[], max_attempts smallint[], delays float8[], due_times timestamptz[], keys text[], tag_lists text[], retentions integer[], fence_token uuid, fence_task uuid, fence_generation integer, repeated boolean, caller_commits boolean, expiries timestamptz[], expiry_delays float8[],
    ordering_keys text[], keeps_keys boolean[], limit_bys text[],
    window_kinds text[], window_keys text[], window_seconds float8[], numbered boolean DEFAULT false
) RETURNS TABLE(ordinal integer, task_id uuid)
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

REVOKE EXECUTE ON FUNCTION windlass.enqueue_windowed, windlass.reserve_windows FROM PUBLIC;
-- Who may write tasks may write these.
DO $$
DECLARE
    granted record;
BEGIN
    FOR granted IN
        SELECT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE a.grantee::regrole::text END AS role
        FROM pg_class c
        CROSS JOIN aclexplode(c.relacl) a
        WHERE c.oid = 'windlass.task'::regclass AND a.grantee <> c.relowner AND a.privilege_type = 'INSERT'
    LOOP
        EXECUTE format(
            'GRANT EXECUTE ON FUNCTION windlass.enqueue_windowed, windlass.reserve_windows TO %s', granted.role);
    END LOOP;
END
$$;

-- enqueue_many: check and add tasks that are given as JSON; returns their ids in order.
CREATE OR REPLACE FUNCTION windlass.enqueue_many(tasks jsonb, fence jsonb DEFAULT NULL::jsonb) RETURNS SETOF uuid
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

-- Who may enqueue by SQL still may when the function has other parameters.
CREATE TEMPORARY TABLE granted_before ON COMMIT DROP AS
SELECT
    CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE a.grantee::pg_catalog.regrole::text END AS role,
    a.is_grantable
FROM pg_catalog.pg_proc p
CROSS JOIN LATERAL pg_catalog.aclexplode(p.proacl) a
WHERE p.oid = 'windlass.enqueue'::regproc AND a.grantee <> p.proowner;

-- enqueue: add one task, for SQL from any language or trigger; what is not said is as its type was registered.
DROP FUNCTION windlass.enqueue;
CREATE FUNCTION windlass.enqueue(type text, payload jsonb DEFAULT '{}'::jsonb, queue text DEFAULT NULL, priority integer DEFAULT NULL, delay float8 DEFAULT NULL::float8, at timestamptz DEFAULT NULL::timestamptz, idempotency_key text DEFAULT NULL, max_attempts integer DEFAULT NULL, tags text[] DEFAULT NULL::text[], expires timestamptz DEFAULT NULL::timestamptz, ordering_key text DEFAULT NULL, on_dead text DEFAULT NULL::text,
    unique_for float8 DEFAULT NULL, throttle float8 DEFAULT NULL, debounce float8 DEFAULT NULL, dedupe_key text DEFAULT NULL
) RETURNS uuid
LANGUAGE plpgsql SECURITY DEFINER
SET search_path TO 'pg_catalog', 'pg_temp'
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

REVOKE EXECUTE ON FUNCTION windlass.enqueue FROM PUBLIC;
DO $$
DECLARE
    granted record;
BEGIN
    FOR granted IN SELECT * FROM pg_temp.granted_before LOOP
        EXECUTE pg_catalog.format('GRANT EXECUTE ON FUNCTION windlass.enqueue TO %s%s', granted.role,
            CASE WHEN granted.is_grantable THEN ' WITH GRANT OPTION' ELSE '' END);
    END LOOP;
END
$$;
DROP TABLE pg_temp.granted_before;

-- enqueue_checked: the same for what is not plain, or wrong.
DROP FUNCTION windlass.enqueue_checked;
CREATE FUNCTION windlass.enqueue_checked(type text, payload jsonb, queue text, priority integer, delay float8, at timestamptz, idempotency_key text, max_attempts integer, tags text[], expires timestamptz, ordering_key text, on_dead text,
    unique_for float8, throttle float8, debounce float8, dedupe_key text
) RETURNS uuid
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
