-- What any language and any trigger may call: enqueue, enqueue_many, cancel.
--
-- They act with the rights of their owner in the session of whoever calls them, and plpgsql reads a
-- function once per session. So what they call must read the same under every setting, also if it was
-- called by itself before: no backslash in a plain literal, and search_path set where variables have types.

-- What these must know of the settings of the applications; the last registration wins.
CREATE TABLE windlass.setting (
    only_row boolean PRIMARY KEY DEFAULT true CHECK (only_row),
    retention interval NOT NULL DEFAULT '7 days',
    key_retention interval NOT NULL DEFAULT '7 days',
    max_payload_bytes integer NOT NULL DEFAULT 1048576
);
INSERT INTO windlass.setting DEFAULT VALUES;

-- new_task_id: a UUID of version 7, which servers before 18 do not make by themselves.
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

-- refuse: raise what is wrong with a call, in the words of the client for Python; 'WL005' is its
-- payload, 'WL006' anything else of it.
CREATE FUNCTION windlass.refuse(code text, said text) RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
    RAISE EXCEPTION '%', said USING ERRCODE = code;
END
$$;

-- quoted: a text as the client for Python quotes it; what a terminal would obey is spelled out.
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

-- shown: a value as a message names it: short, whatever it is.
CREATE FUNCTION windlass.shown(value jsonb) RETURNS text
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
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

-- is_whole: whether a value, if there is one, is an integer within these bounds; 1.0 is none.
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

-- checked_name: a name that may be a type, queue, tag or key.
CREATE FUNCTION windlass.checked_name(what text, given jsonb) RETURNS text
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
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

-- checked_id: an id, if there is one: that which a task brings with it, or of a fence.
CREATE FUNCTION windlass.checked_id(given jsonb, what text DEFAULT 'id', whose text DEFAULT 'task') RETURNS uuid
LANGUAGE plpgsql
AS $$
BEGIN
    IF jsonb_typeof(given) <> 'string'
        OR given #>> '{}' !~* '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$' THEN
        PERFORM windlass.refuse('WL006',
            format('%s %s is not the id of a %s; ids are UUIDs', what, windlass.shown(given), whose));
    END IF;
    RETURN given #>> '{}';
END
$$;

-- refuse_id: refuse the id at a place in a call, if there is one, since another task has it.
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

-- checked_priority: a priority by number or by name.
CREATE FUNCTION windlass.checked_priority(given jsonb) RETURNS smallint
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
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

-- checked_delay: how many seconds to wait.
CREATE FUNCTION windlass.checked_delay(given jsonb) RETURNS float8
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

-- checked_time: when to begin, as a text with its time zone.
CREATE FUNCTION windlass.checked_time(given jsonb) RETURNS timestamptz
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET TimeZone = 'UTC'  -- one that somebody made up may have another hour for the letter Z
AS $$
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
$$;

-- compact_bytes: the size of a payload without the blanks that PostgreSQL puts between its parts.
CREATE FUNCTION windlass.compact_bytes(payload jsonb) RETURNS bigint
LANGUAGE sql IMMUTABLE
AS $$
SELECT octet_length(payload::text) - coalesce(sum(
    CASE jsonb_typeof(part)
        WHEN 'array' THEN greatest(jsonb_array_length(part) - 1, 0)
        WHEN 'object' THEN (SELECT greatest(2 * count(*) - 1, 0) FROM jsonb_object_keys(part))
        ELSE 0
    END
), 0)
FROM jsonb_path_query(payload, 'strict $.**') AS q (part)
$$;

-- payload_fault: why a payload, or a part of it, is too large or could not be read back; the limits are
-- those of Python.
CREATE FUNCTION windlass.payload_fault(part jsonb, max_bytes integer) RETURNS text
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, pg_temp
AS $$
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
$$;

-- check_payload: refuse what cannot be the arguments of a task; one that is at fault by itself is named.
CREATE FUNCTION windlass.check_payload(type text, payload jsonb, max_bytes integer) RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
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

-- check_fence: refuse what does not have the form of a fence.
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

-- enqueue_many: add all tasks of an array or none; returns their ids in its order. A task is an
-- object of the parameters of enqueue; it may bring a new id, and the seconds that it is kept for.
-- fence is what the enqueue of a handler shows: token, task_id, generation.
CREATE FUNCTION windlass.enqueue_many(tasks jsonb, fence jsonb DEFAULT NULL) RETURNS SETOF uuid
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
BEGIN
    IF jsonb_typeof(tasks) IS DISTINCT FROM 'array' THEN
        PERFORM windlass.refuse('WL005', format(
            'enqueue_many was given a value of type %s; use an array of objects, each with a type',
            coalesce(jsonb_typeof(tasks), 'null')));
    END IF;
    PERFORM windlass.check_fence(fence);
    SELECT * INTO settings FROM windlass.setting;
    FOR item, place IN SELECT e.item, e.ordinal - 1
        FROM jsonb_array_elements(tasks) WITH ORDINALITY AS e (item, ordinal)
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

-- enqueue: add a task with the defaults that workers registered for its type; returns its id, or
-- that of the first task of the same idempotency key.
CREATE FUNCTION windlass.enqueue(
    type text, payload jsonb DEFAULT '{}', queue text DEFAULT NULL, priority integer DEFAULT NULL,
    delay float8 DEFAULT NULL, at timestamptz DEFAULT NULL, idempotency_key text DEFAULT NULL,
    max_attempts integer DEFAULT NULL, tags text[] DEFAULT NULL
) RETURNS uuid
LANGUAGE sql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET extra_float_digits = 1  -- the delay goes through a text
SET TimeZone = 'UTC'  -- and so does the time
AS $$
SELECT windlass.enqueue_many(jsonb_build_array(jsonb_build_object(
    'type', type, 'payload', payload, 'queue', queue, 'priority', priority, 'delay', delay,
    -- What is past means now, also before our era, which a text says in another way.
    'at', CASE WHEN at < '0001-01-02 00:00:00+00' THEN '0001-01-02 00:00:00+00' ELSE at END,
    'idempotency_key', idempotency_key,
    'max_attempts', max_attempts, 'tags', tags
)))
$$;

-- cancel: end a waiting task, or ask the worker of one that runs; false if it had ended before.
CREATE FUNCTION windlass.cancel(id uuid, reason text DEFAULT 'cancelled on request') RETURNS boolean
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
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

-- cancel calls it.
ALTER FUNCTION windlass.cancel_task SET search_path = pg_catalog, pg_temp;

-- They act with the rights of the schema's owner, so nobody may call them who was not let.
REVOKE EXECUTE ON FUNCTION windlass.enqueue_many, windlass.enqueue, windlass.cancel FROM PUBLIC;
