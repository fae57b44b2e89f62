-- Gates: tasks that wait for an ordering key, or for a place among those of one value of an argument.
-- Tasks that have none of this are written and read as before: whoever claims, settles or promotes looks into
-- `gate_used`, and no further.

-- A row from the first task on that has a gate; there may be more, so that nobody waits for who adds the first.
CREATE TABLE windlass.gate_used (
    since timestamptz NOT NULL
);

-- Which gates a task has to pass: written once, and kept as long as its record.
CREATE TABLE windlass.task_gate (
    task_id uuid PRIMARY KEY,
    ordering_key text,
    order_gate bigint,
    limit_type text,
    limit_value text,
    limit_gate bigint,
    limit_by jsonb,
    keeps_key boolean NOT NULL,  -- also when it has failed
    CHECK ((ordering_key IS NULL) = (order_gate IS NULL)),
    CHECK ((limit_gate IS NULL) = (limit_value IS NULL) AND (limit_gate IS NULL) = (limit_by IS NULL)),
    CHECK (ordering_key IS NOT NULL OR limit_gate IS NOT NULL)
);

-- A key that is in use. Only who opens gates locks one, sorted, and in a short transaction.
CREATE TABLE windlass.gate (
    gate bigint PRIMARY KEY,
    type text,  -- NULL: of an ordering key
    name text NOT NULL,  -- that key, or the value
    held integer NOT NULL DEFAULT 0 CHECK (held >= 0),  -- tasks that were let through, and have not left
    tokens double precision,  -- NULL: as many as the burst
    counted_at timestamptz,  -- when there were so many
    called_for timestamptz,  -- when it is to be looked at again, by itself
    -- None that waits lies before: what was let through is not walked over while an old snapshot keeps it.
    from_x xid8 NOT NULL DEFAULT '0',
    from_n bigint NOT NULL DEFAULT -1
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 1000);

-- A task at a gate. While it waits this is its place; once it was let through it is somewhere else as well.
-- To let it through is an update of this row that no index has to know of: those that wait come after
-- those that do not.
CREATE TABLE windlass.gate_entry (
    gate bigint NOT NULL,
    x xid8 NOT NULL DEFAULT pg_current_xact_id(),
    n bigint GENERATED ALWAYS AS IDENTITY (CACHE 100),
    task_id uuid NOT NULL,
    is_open boolean NOT NULL DEFAULT false
) WITH (fillfactor = 60, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 1000);
CREATE INDEX gate_entry_order ON windlass.gate_entry (gate, x, n);
CREATE INDEX gate_entry_task ON windlass.gate_entry (task_id);

-- Gates that somebody is to look at, since tasks came to them, or leave them, or their bucket has tokens again.
CREATE TABLE windlass.gate_call (
    gate bigint NOT NULL,
    due timestamptz NOT NULL,
    leaving uuid
) WITH (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 1000);
CREATE INDEX gate_call_due ON windlass.gate_call (due);
CREATE INDEX gate_call_leaving ON windlass.gate_call (leaving) WHERE leaving IS NOT NULL;
CREATE INDEX gate_call_left ON windlass.gate_call (gate) WHERE leaving IS NOT NULL;

-- How many tasks of a type may be let through of one value (`value` NULL: of each that has no rule of its own).
CREATE TABLE windlass.value_rule (
    type text NOT NULL,
    value text,
    by_operator boolean NOT NULL,
    concurrency integer CHECK (concurrency > 0),
    rate double precision CHECK (rate > 0),  -- per second
    burst double precision CHECK (burst >= 1),
    weight integer CHECK (weight > 0),
    changed_at timestamptz NOT NULL,
    UNIQUE NULLS NOT DISTINCT (type, value, by_operator),
    CHECK ((rate IS NULL) = (burst IS NULL))
);

-- Types whose rules have changed of late: a gate that was just being opened may have gone by the old one.
CREATE TABLE windlass.value_rule_change (
    type text NOT NULL,
    changed_at timestamptz NOT NULL,
    seen_before xid8  -- who goes by the old rule is an older transaction than this
);

-- By which arguments the limit of a type is: [name, default] of each.
ALTER TABLE windlass.task_type ADD COLUMN limit_by jsonb;

-- The numbers of gates: even for ordering keys, odd for values.
CREATE FUNCTION windlass.order_gate(ordering_key text) RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
SELECT hashtextextended(ordering_key COLLATE "C", 0) & ~1::bigint
$$;

CREATE FUNCTION windlass.limit_gate(type text, value text) RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
SELECT hashtextextended((type || E'\x1f' || value) COLLATE "C", 0) | 1::bigint
$$;

-- limit_value: what a payload has for the arguments that a limit is by, as a text of at most 200 characters.
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

-- gate_room: how many more tasks a gate lets through at a moment (a thousand at most, in one go), of how many
-- in all (NULL: of any number), and what is in its bucket. What it let through and nobody has claimed yet leaves that much
-- less room in the bucket (`most`): else more could begin at once, when somebody comes to claim, than the burst.
CREATE FUNCTION windlass.gate_room(
    number bigint, type text, value text, held bigint, tokens float8, counted_at timestamptz, at timestamptz
) RETURNS TABLE (room integer, slots integer, rate float8, burst float8, tokens float8, most float8)
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

-- gate_used_by: how many tasks a gate has let through that are not about to leave.
CREATE FUNCTION windlass.gate_used_by(number bigint) RETURNS integer
LANGUAGE sql STABLE
AS $$
SELECT coalesce((SELECT g.held FROM windlass.gate g WHERE g.gate = number), 0)
    - (SELECT count(*)::integer FROM windlass.gate_call c WHERE c.leaving IS NOT NULL AND c.gate = number)
$$;

-- gate_status: what people are told of a task that waits at a gate: whether the next claim would find that it can go on.
CREATE FUNCTION windlass.gate_status(waiting uuid) RETURNS windlass.task_status
LANGUAGE plpgsql STABLE
SET enable_seqscan = off
SET enable_bitmapscan = off
SET jit = off
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

-- place_gated: give tasks that have gates a place, or the next one: at the gate of their ordering key, unless they were
-- let through there; among those that wait for their time; at the gate of their value; among those that are ready.
-- Returns the gates at which they wait now: somebody has to look at those.
-- Entries are found by their task: with IS TRUE the index of gates is of no use for that, here and below.
CREATE FUNCTION windlass.place_gated(placed uuid[]) RETURNS bigint[]
LANGUAGE plpgsql
SET search_path TO 'pg_catalog', 'pg_temp'
SET enable_hashjoin = off
SET enable_mergejoin = off
SET enable_material = off
SET enable_seqscan = off
SET enable_bitmapscan = off
SET plan_cache_mode = force_generic_plan
SET jit = off
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

-- make_ready: put tasks into `ready` that have passed their last gate, in this order.
CREATE FUNCTION windlass.make_ready(through uuid[]) RETURNS void
LANGUAGE plpgsql
SET search_path TO 'pg_catalog', 'pg_temp'
SET enable_hashjoin = off
SET enable_mergejoin = off
SET enable_material = off
SET enable_seqscan = off
SET enable_bitmapscan = off
SET plan_cache_mode = force_generic_plan
SET jit = off
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

-- gate_name: whose gate this is, by one of the tasks that are at it.
CREATE FUNCTION windlass.gate_name(number bigint) RETURNS TABLE (type text, name text)
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

-- pass_gates: look at gates: count those out that have left (`left_gates`, a number for each), and let others through.
-- `leaving` may have to leave yet, unless somebody has reopened them meanwhile.
-- Locks the gates in order, those of ordering keys first, and waits for them: whoever has one is about to commit. What it
-- decides on is read after that. A waiting task that somebody else holds is not passed over: its gate is called again.
CREATE FUNCTION windlass.pass_gates(
    called bigint[], left_gates bigint[], left_numbers integer[], leaving uuid[]
) RETURNS void
LANGUAGE plpgsql
SET search_path TO 'pg_catalog', 'pg_temp'
SET enable_hashjoin = off
SET enable_mergejoin = off
SET enable_material = off
SET enable_seqscan = off
SET enable_bitmapscan = off
SET plan_cache_mode = force_generic_plan
SET jit = off
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

-- answer_calls: look at gates that were called; returns how many calls that were. What is older than ten seconds is
-- left to the leader and to who has nothing else to do (`all_of_them`): from the beginning of the index all that an old
-- snapshot keeps would be walked over. Half of the calls are the newest, so that what comes after very many does not
-- wait until all those were looked at.
CREATE FUNCTION windlass.answer_calls(max_calls integer, all_of_them boolean) RETURNS integer
LANGUAGE plpgsql
SET enable_hashjoin = on
SET enable_seqscan = off
SET enable_bitmapscan = off
SET jit = off
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

-- change_value_rules: call the gates of types whose rules have changed, and remember it for those that nobody can see yet.
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

-- call_changed: call the gates of types whose rules have changed once more, when everybody has ended who may have gone by
-- the old ones. Who opens a gate has a number from the moment it locked it, before it reads a rule: so whoever read an
-- old one is older than a look that sees the new one. After a minute it is not waited for: no claim takes so long.
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

-- left_by: which of these tasks have to leave which gates, as they are now: both if they have ended, but for a key that
-- a failed one keeps; that of their value if they wait for their time.
CREATE FUNCTION windlass.left_by(task_ids uuid[]) RETURNS TABLE (task_id uuid, gate bigint)
LANGUAGE sql STABLE
SET search_path TO 'pg_catalog', 'pg_temp'
SET enable_seqscan = off
SET enable_bitmapscan = off
SET jit = off
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

-- mend_gates: see to what should not be, at some of the gates, another part each time: tasks that ended without a
-- word to their gates, as an older worker ends them, are called to leave; and where one waits before those that were let
-- through, as in a database that was copied to a server which counts transactions anew, the line is read from its beginning.
CREATE FUNCTION windlass.mend_gates(first_gate bigint) RETURNS integer
LANGUAGE plpgsql
SET search_path TO 'pg_catalog', 'pg_temp'
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
SET enable_material = off
SET jit = off
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

-- leave_gates: let tasks that this transaction has just ended or put off leave their gates, and others through.
-- `are_completed`: so did all of them, and it need not be looked for where they are.
CREATE FUNCTION windlass.leave_gates(task_ids uuid[], are_completed boolean) RETURNS void
LANGUAGE plpgsql
SET search_path TO 'pg_catalog', 'pg_temp'
SET enable_hashjoin = off
SET enable_mergejoin = off
SET enable_material = off
SET enable_seqscan = off
SET enable_bitmapscan = off
SET jit = off
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

-- call_gates: the same for whoever else ends tasks, perhaps in a transaction that stays open: that locks no gate.
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

-- enter_gates: note which gates new tasks have to pass, and let them wait at the first one. `are_later`: those whose time is
-- ahead wait for that, unless they have an ordering key.
CREATE FUNCTION windlass.enter_gates(
    task_ids uuid[], types text[], payloads text[], ordering_keys text[], keeps_keys boolean[], limit_bys text[],
    are_later boolean[]
) RETURNS void
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

-- take_all_waiting: take tasks out of the places in which they wait; returns those that were. Waits for nobody:
-- what somebody holds stays where it is. `untried`: only those of which no attempt was made.
CREATE FUNCTION windlass.take_all_waiting(wanted uuid[], untried boolean) RETURNS uuid[]
LANGUAGE plpgsql
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
SET enable_material = off
SET jit = off
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

-- enqueue_tasks: add tasks; answers with those that were there before, by their place in the call.
-- `ordering_keys`, `keeps_keys` and `limit_bys` say which tasks have to pass gates; NULL if none has.
DROP FUNCTION windlass.enqueue_tasks;
CREATE FUNCTION windlass.enqueue_tasks(task_ids uuid[], types text[], queues text[], priorities smallint[], payloads text[], max_attempts smallint[], delays float8[], due_times timestamptz[], keys text[], tag_lists text[], retentions integer[], fence_token uuid, fence_task uuid, fence_generation integer, repeated boolean, caller_commits boolean, numbered boolean DEFAULT false,
    ordering_keys text[] DEFAULT NULL, keeps_keys boolean[] DEFAULT NULL, limit_bys text[] DEFAULT NULL
) RETURNS TABLE(ordinal integer, task_id uuid)
LANGUAGE plpgsql
SET search_path TO 'pg_catalog', 'pg_temp'
SET enable_hashjoin = off
SET enable_mergejoin = off
SET enable_material = off
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

-- enqueue_expiring: the same for tasks of which some have to begin by a time, or within one.
DROP FUNCTION windlass.enqueue_expiring;
CREATE FUNCTION windlass.enqueue_expiring(task_ids uuid[], types text[], queues text[], priorities smallint[], payloads text[], max_attempts smallint[], delays float8[], due_times timestamptz[], keys text[], tag_lists text[], retentions integer[], fence_token uuid, fence_task uuid, fence_generation integer, repeated boolean, caller_commits boolean, expiries timestamptz[], expiry_delays float8[],
    ordering_keys text[] DEFAULT NULL, keeps_keys boolean[] DEFAULT NULL, limit_bys text[] DEFAULT NULL
) RETURNS TABLE(ordinal integer, task_id uuid)
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

-- enqueue_many: check and add tasks that are given as JSON; returns their ids in order.
CREATE OR REPLACE FUNCTION windlass.enqueue_many(tasks jsonb, fence jsonb DEFAULT NULL::jsonb) RETURNS SETOF uuid
LANGUAGE plpgsql SECURITY DEFINER
SET search_path TO 'pg_catalog', 'pg_temp'
AS $$
#variable_conflict use_variable
DECLARE
    known_options constant text[] :=
        '{id,type,payload,queue,priority,delay,at,expires,idempotency_key,ordering_key,on_dead,max_attempts,tags,retention}';
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
        false, true, numbered,
        CASE WHEN array_remove(ordering_keys, NULL) <> '{}' THEN ordering_keys END, keeps_keys,
        CASE WHEN array_remove(limit_bys, NULL) <> '{}' THEN limit_bys END
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

-- checked_limit_by: by which arguments a limit is, as a client says it.
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

-- Who may enqueue by SQL still may when the function has other parameters.
CREATE TEMPORARY TABLE granted_before ON COMMIT DROP AS
SELECT r.rolname
FROM pg_catalog.pg_proc p
CROSS JOIN LATERAL pg_catalog.aclexplode(p.proacl) a
JOIN pg_catalog.pg_roles r ON r.oid = a.grantee
WHERE p.oid = 'windlass.enqueue'::regproc AND a.privilege_type = 'EXECUTE' AND a.grantee <> p.proowner;

-- enqueue: add one task, for SQL from any language or trigger; what is not said is as its type was registered.
DROP FUNCTION windlass.enqueue;
CREATE FUNCTION windlass.enqueue(type text, payload jsonb DEFAULT '{}'::jsonb, queue text DEFAULT NULL, priority integer DEFAULT NULL, delay float8 DEFAULT NULL::float8, at timestamptz DEFAULT NULL::timestamptz, idempotency_key text DEFAULT NULL, max_attempts integer DEFAULT NULL, tags text[] DEFAULT NULL::text[], expires timestamptz DEFAULT NULL::timestamptz, ordering_key text DEFAULT NULL, on_dead text DEFAULT NULL::text) RETURNS uuid
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
        ordering_key, on_dead);
END
$$;

REVOKE EXECUTE ON FUNCTION windlass.enqueue FROM PUBLIC;
DO $$
DECLARE
    role name;
BEGIN
    FOR role IN SELECT g.rolname FROM pg_temp.granted_before g LOOP
        EXECUTE pg_catalog.format('GRANT EXECUTE ON FUNCTION windlass.enqueue TO %I', role);
    END LOOP;
END
$$;
DROP TABLE pg_temp.granted_before;

-- enqueue_checked: the same for what is not plain, or wrong.
DROP FUNCTION windlass.enqueue_checked;
CREATE FUNCTION windlass.enqueue_checked(type text, payload jsonb, queue text, priority integer, delay float8, at timestamptz, idempotency_key text, max_attempts integer, tags text[], expires timestamptz, ordering_key text, on_dead text) RETURNS uuid
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
    'max_attempts', max_attempts, 'tags', tags, 'ordering_key', ordering_key, 'on_dead', on_dead
)))
$$;

-- promote_due: make tasks ready whose time has come, or send them to the gates that they have to pass.
CREATE OR REPLACE FUNCTION windlass.promote_due(max_tasks integer, all_of_them boolean) RETURNS integer
LANGUAGE plpgsql
SET enable_seqscan = off
SET enable_bitmapscan = off
SET jit = off
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

-- take_waiting: take a task out of the place in which it waits; false if it does not wait.
CREATE OR REPLACE FUNCTION windlass.take_waiting(waiting uuid) RETURNS boolean
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

-- end_cancelled: end tasks as cancelled; the caller has taken them out of their places.
CREATE OR REPLACE FUNCTION windlass.end_cancelled(ended uuid[], why text, retention interval, key_retention interval) RETURNS void
LANGUAGE plpgsql
SET search_path TO 'pg_catalog', 'pg_temp'
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
SET enable_material = off
SET jit = off
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

-- bury_tasks: end tasks as dead that wait for another attempt; the caller has taken them out of their places.
CREATE OR REPLACE FUNCTION windlass.bury_tasks(buried uuid[], why text, ended_by uuid, dead_retention interval, key_retention interval) RETURNS void
LANGUAGE plpgsql
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
SET enable_material = off
SET jit = off
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

-- fail_unknown: fail tasks of a type that no worker knows.
CREATE OR REPLACE FUNCTION windlass.fail_unknown(unknown text, error jsonb, ready_for interval, max_tasks integer, dead_retention interval, key_retention interval) RETURNS uuid[]
LANGUAGE plpgsql
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
SET enable_material = off
SET jit = off
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

-- cancel_tasks: cancel tasks in one transaction, going round what somebody holds; see cancel_task.
CREATE OR REPLACE FUNCTION windlass.cancel_tasks(cancelled uuid[], why text, retention interval, key_retention interval) RETURNS TABLE(task_id uuid, answer text)
LANGUAGE plpgsql
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
SET enable_material = off
SET jit = off
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

-- expire_tasks: cancel tasks that wait although they should have begun by now.
CREATE OR REPLACE FUNCTION windlass.expire_tasks(max_tasks integer, retention interval, key_retention interval) RETURNS TABLE(cancelled integer, has_more boolean)
LANGUAGE plpgsql
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
SET enable_material = off
SET jit = off
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

-- change_task: change a task that waits; false if it does not. At a gate it keeps its place in the line.
CREATE OR REPLACE FUNCTION windlass.change_task(changed uuid, new_priority smallint, new_queue text, new_due timestamptz, new_delay float8) RETURNS boolean
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

-- retry_task: reopen an ended, unsuccessful task as a new generation.
CREATE OR REPLACE FUNCTION windlass.retry_task(reopened uuid) RETURNS boolean
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

-- replay_dead: make new tasks of dead letters. 
CREATE OR REPLACE FUNCTION windlass.replay_dead(ancestors uuid[], new_ids uuid[], delays float8[], payloads text[], again boolean) RETURNS TABLE(answer text, task_id uuid)
LANGUAGE plpgsql
SET search_path TO 'pg_catalog', 'pg_temp'
SET enable_hashjoin = off
SET enable_mergejoin = off
SET enable_material = off
SET enable_seqscan = off
SET enable_bitmapscan = off
SET jit = off
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

-- remove_dead: remove dead letters with all that is kept of them; returns which were.
CREATE OR REPLACE FUNCTION windlass.remove_dead(removed uuid[]) RETURNS SETOF uuid
LANGUAGE plpgsql
SET search_path TO 'pg_catalog', 'pg_temp'
SET enable_hashjoin = off
SET enable_mergejoin = off
SET enable_material = off
SET enable_seqscan = off
SET enable_bitmapscan = off
SET jit = off
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

-- drop_history_partition: remove ended tasks of some days, with all that is kept of them.
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

-- tasks: one row per task, live or ended, for people.
CREATE OR REPLACE VIEW windlass.tasks AS
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
            WHEN (e.task_id IS NOT NULL) THEN windlass.gate_status(t.id)::text
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
