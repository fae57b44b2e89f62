-- Rules for the lanes of a queue or a type: how many of their tasks may be held at once, how many may begin in a
-- time, how they age, and types that are paused. What has no rule pays for one look into an empty table.

-- What code declares, and what an operator has set, which stands instead as long as it is there.
CREATE TABLE windlass.lane_rule (
    scope text NOT NULL CHECK (scope IN ('queue', 'type')),
    name text NOT NULL,
    by_operator boolean NOT NULL,
    concurrency integer CHECK (concurrency > 0),
    rate double precision CHECK (rate > 0),     -- per second
    burst double precision CHECK (burst >= 1),
    ageing double precision CHECK (ageing >= 0),  -- seconds for each point of priority; Infinity: strict
    weight integer CHECK (weight > 0),
    changed_at timestamptz NOT NULL,
    PRIMARY KEY (scope, name, by_operator),
    CHECK ((rate IS NULL) = (burst IS NULL)),
    CHECK (scope = 'queue' OR (ageing IS NULL AND weight IS NULL))
);

CREATE VIEW windlass.lane_rule_in_force AS
SELECT DISTINCT ON (r.scope, r.name)
    r.scope, r.name, r.by_operator, r.concurrency, r.rate, r.burst, r.ageing, r.weight, r.changed_at
FROM windlass.lane_rule r
ORDER BY r.scope, r.name, r.by_operator DESC;

CREATE TABLE windlass.paused_type (
    type text PRIMARY KEY,
    paused_at timestamptz NOT NULL
);

-- How much of each limit is in use. It is changed by every claim and settlement, and found by its key: versions that
-- an old snapshot keeps would be walked over each time. So after a number of changes it becomes another row with
-- a higher `version`, and the highest one is read from the end of the index.
CREATE TABLE windlass.limit_use (
    scope text NOT NULL,
    name text NOT NULL,
    version bigint NOT NULL,
    used integer NOT NULL,
    tokens double precision,        -- NULL: as many as the burst
    counted_at timestamptz NOT NULL,  -- when there were so many tokens
    changes smallint NOT NULL DEFAULT 0,
    PRIMARY KEY (scope, name, version)
) WITH (fillfactor = 20, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 1000);

-- What a claim holds of limits of concurrency: a row for each lane it took tasks of, or one for all its tasks
-- (`task_ids` NULL). `remaining` have not been given back; the sum over all claims is what `limit_use` says is used.
CREATE TABLE windlass.claim_limit (
    token uuid NOT NULL,
    scope text NOT NULL,
    name text NOT NULL,
    task_ids uuid[],
    remaining integer NOT NULL CHECK (remaining > 0)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 1000);
CREATE INDEX claim_limit_token ON windlass.claim_limit (token);
ALTER TABLE windlass.claim_limit ALTER COLUMN task_ids SET STORAGE EXTERNAL;

-- is_limited: whether a claim has to ask before it takes tasks of this queue and type.
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

-- lock_limit: let nobody else change what is in use of a limit until this transaction ends. Not a lock on a row:
-- somebody's open transaction may have changed the rule.
CREATE FUNCTION windlass.lock_limit(scope text, name text) RETURNS void
LANGUAGE sql
AS $$
SELECT pg_advisory_xact_lock(hashtextextended(
    format('%s %s %s', 'windlass.limit_use'::regclass::oid, scope, name), 0))
$$;

-- limit_room: how many tasks a limit lets through at a moment, and what is in its bucket.
-- After the clock has jumped back nobody knows how long ago it was counted: it is full.
CREATE FUNCTION windlass.limit_room(
    scope text, name text, concurrency integer, rate float8, burst float8, at timestamptz
) RETURNS TABLE (room integer, tokens float8)
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

-- open_limits: what the limits let through of lanes that a claim would take tasks of. Those that let any through are
-- locked, sorted, before the claim locks anything else: after that it waits for nothing.
CREATE FUNCTION windlass.open_limits(
    types text[], queues text[], lanes bigint[], from_x bigint[], from_n bigint[], all_of_them boolean,
    other_than text[]
) RETURNS TABLE (
    scope text, name text, is_counted boolean, rate float8, burst float8,
    room integer, tokens float8, counted_at timestamptz
)
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

-- change_use: count tasks that a claim took, or that came back; returns how many were in use before. NULL for
-- `left_tokens` leaves those as they were. The caller has locked the limit.
CREATE FUNCTION windlass.change_use(
    changed_scope text, changed_name text, taken integer, left_tokens float8, at timestamptz
) RETURNS integer
LANGUAGE plpgsql
SET enable_seqscan = off
SET enable_bitmapscan = off
SET jit = off
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

-- give_back: count down what claims hold of limits for tasks, given with the token of each. Comes last in a
-- transaction: it locks limits, sorted, after whatever else the caller has locked, and a claim that waits for one holds
-- nothing but limits.
CREATE FUNCTION windlass.give_back(tokens uuid[], ended uuid[]) RETURNS void
LANGUAGE plpgsql
SET enable_seqscan = off
SET enable_bitmapscan = off
SET jit = off
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

-- ruled_heads: the lanes of a claim with their first tasks, most urgent first, where queues may age by steps of their
-- own and types may be paused. In a queue that is strict no lane comes before one of a higher priority; among
-- those of other queues each has the rank of the last one that has to come before it. `limits` are those that the
-- lane's tasks count for.
CREATE FUNCTION windlass.ruled_heads(
    types text[], queues text[], ageing interval, lanes bigint[], from_x bigint[], from_n bigint[], late xid8[],
    other_than text[]
) RETURNS TABLE (
    lane bigint, type text, queue text, priority smallint, kind smallint, x xid8, n bigint, ready_at timestamptz,
    limits text[]
)
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

-- claim_batches: grant up to `wanted` ready tasks under one lease.
-- `lanes`, `from_x`, `from_n` say where the caller's last look at each lane ended; a lane that is
-- not among them is read from its beginning. `late_x` are transactions that were still open
-- when those looks went past them and have ended since: their rows lie behind.
-- Returns a row for each lane it took tasks of, with a column of each value, in the lane's order; and
-- last (type NULL) what it saw: the snapshot, the lanes read, and which tasks are to be cancelled.
-- Where there are rules it waits for the limits it needs, and of what is counted takes no more than `at_most`, or a
-- quarter of what the limit has left. `is_capped` says that it would have taken more, `more_in` when a limit lets more through by itself. Else it waits for nothing: a locked row is skipped, so the caller has to come back for it.
DROP FUNCTION windlass.claim_batches;
CREATE FUNCTION windlass.claim_batches(
    worker uuid, new_token uuid, types text[], queues text[], wanted integer, lease interval,
    ageing interval, alone boolean,
    lanes bigint[], from_x bigint[], from_n bigint[], late_x bigint[],
    at_most integer DEFAULT NULL, other_than text[] DEFAULT NULL
) RETURNS TABLE (
    type text, queue text, priority smallint, ids uuid[], payloads text[], attempts smallint[],
    max_attempts smallint[], generations integer[], waited float8[],
    fence bigint, snapshot text, read_lanes bigint[], last_x bigint[], last_n bigint[],
    read_to_end boolean[], alone_waiting boolean, due_in float8,
    cancelled uuid[], reasons text[], more_in float8, is_capped boolean, has_calls boolean
)
LANGUAGE plpgsql
SET enable_hashjoin = off
SET enable_mergejoin = off
SET enable_seqscan = off
SET enable_bitmapscan = off
SET plan_cache_mode = force_generic_plan
SET jit = off
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

-- claim_lane: the same for a worker that had nothing left to claim when a wake-up named this lane: no other
-- is looked at, and what is due later neither. To begin the statement of claim_batches that compares the lanes
-- takes longer than all that is done here.
-- Returns one row, with no tasks if there are none or the lane is not the worker's to read. If the lane has a limit
-- it takes none, and says so by NULL for `alone_waiting`: all lanes are to be read.
CREATE OR REPLACE FUNCTION windlass.claim_lane(
    worker uuid, new_token uuid, types text[], queues text[], wanted integer, lease interval,
    named_lane bigint, from_x bigint, from_n bigint
) RETURNS TABLE (
    type text, queue text, priority smallint, ids uuid[], payloads text[], attempts smallint[],
    max_attempts smallint[], generations integer[], waited float8[],
    fence bigint, snapshot text, read_lanes bigint[], last_x bigint[], last_n bigint[],
    read_to_end boolean[], alone_waiting boolean, due_in float8,
    cancelled uuid[], reasons text[]
)
LANGUAGE plpgsql
SET enable_hashjoin = off
SET enable_mergejoin = off
SET enable_seqscan = off
SET enable_bitmapscan = off
SET plan_cache_mode = force_generic_plan
SET jit = off
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

-- claim_one: grant the task that a wake-up named, if it is ready and this worker's; else nothing.
-- If one before it waits in its lane, or that has a limit, nothing is granted either, and `is_behind` says that the
-- lane is to be read: behind the bound that the worker has there. Anybody may send a notification, so what it names is not believed.
-- A task of the first generation has never been claimed: it is no suspect, and no worker was asked to cancel it.
CREATE OR REPLACE FUNCTION windlass.claim_one(
    worker uuid, new_token uuid, types text[], queues text[], lease interval, named_lane bigint, named uuid,
    from_x bigint, from_n bigint
) RETURNS TABLE (
    type text, queue text, priority smallint, payload text, attempts smallint, max_attempts smallint,
    waited float8, fence bigint, is_behind boolean
)
LANGUAGE plpgsql
SET enable_seqscan = off
SET plan_cache_mode = force_generic_plan
SET jit = off
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

-- Why a task waits for its time, if it is for no error: its handler snoozed it, or it was not let begin.
ALTER TABLE windlass.scheduled ADD COLUMN put_off text;

-- settle_batch: apply what became of tasks whose claim and generation still hold.
-- `which` says of each task which of the `tokens` is its claim's, from 1; `outcomes` are those of Outcome
-- in Python. NULL are `which` if there is one token, `generations` if all are 1, `outcomes` if all are
-- completed, and `results`, `delays`, `errors` and `reported` if none has one.
-- Returns, of those not applied, the place in the call and whether they had been applied before.
-- Holds claims FOR KEY SHARE while it may wait for tasks, so heartbeats go on and a rescue
-- keeps away; counts `remaining` down last, lets others through the gates that tasks leave, and gives back
-- what they hold of limits.
CREATE OR REPLACE FUNCTION windlass.settle_batch(
    tokens uuid[], which smallint[], task_ids uuid[], generations integer[], started_after float8[],
    outcomes text[], results text[], delays float8[], errors text[], reported boolean[],
    retention interval, dead_retention interval, key_retention interval, patience interval
) RETURNS TABLE (ordinal integer, before boolean)
LANGUAGE plpgsql
SET enable_hashjoin = off
SET enable_mergejoin = off
SET enable_seqscan = off
SET enable_bitmapscan = off
SET plan_cache_mode = force_generic_plan
SET jit = off
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

-- settle_failures: as before; also what is no retry says that it was put off.
CREATE OR REPLACE FUNCTION windlass.settle_failures(
    tokens uuid[], which smallint[], task_ids uuid[], generations integer[], started_after double precision[],
    outcomes text[], results text[], delays double precision[], errors text[], reported boolean[],
    retention interval, dead_retention interval, key_retention interval, patience interval,
    max_ages double precision[], calls_back boolean
) RETURNS TABLE (ordinal integer, before boolean, given_up boolean)
LANGUAGE plpgsql
SET jit = off
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

-- rescue_claims: take back what claims hold that are over, and with the claims what they hold of limits.
CREATE OR REPLACE FUNCTION windlass.rescue_claims(
    max_claims integer, dead_retention interval, retention interval, key_retention interval
) RETURNS TABLE (
    claims integer, returned integer, lost_attempts integer, dead integer, cancelled integer, died uuid[]
)
LANGUAGE plpgsql
SET enable_hashjoin = off
SET enable_mergejoin = off
SET enable_seqscan = off
SET enable_bitmapscan = off
SET lock_timeout = '100ms'
SET jit = off
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

-- unknown_types: the types of ready tasks that no registered worker knows; those in paused queues wait for somebody.
CREATE OR REPLACE FUNCTION windlass.unknown_types() RETURNS SETOF text
LANGUAGE sql STABLE
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
SET jit = off
AS $$
SELECT DISTINCT l.type
FROM windlass.lane l
CROSS JOIN LATERAL (SELECT FROM windlass.ready r WHERE r.lane = l.lane LIMIT 1) r
WHERE NOT EXISTS (SELECT FROM windlass.worker w WHERE l.type = ANY (w.types))
    AND NOT EXISTS (SELECT FROM windlass.queue q WHERE q.name = l.queue AND q.paused_at IS NOT NULL)
    AND NOT EXISTS (SELECT FROM windlass.paused_type p WHERE p.type = l.type)
ORDER BY l.type
$$;
