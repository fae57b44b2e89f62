-- A claim says how many seconds each of its tasks has waited since it became ready.

DROP FUNCTION windlass.claim_tasks(
    uuid, uuid, text[], text[], integer, interval, interval, boolean, bigint[], bigint[], bigint[], bigint[]
);

-- claim_tasks: grant up to `wanted` ready tasks under one lease.
-- `lanes`, `from_x`, `from_n` say where the caller's last look at each lane ended; a lane that is
-- not among them is read from its beginning. `late_x` are transactions that were still open
-- when those looks went past them and have ended since: their rows lie behind.
-- The first row (id NULL) reports the snapshot and the lanes read; the others are the tasks.
-- Waits for nothing: a locked row is skipped, so the caller has to come back for it.
CREATE FUNCTION windlass.claim_tasks(
    worker uuid, new_token uuid, types text[], queues text[], wanted integer, lease interval,
    ageing interval, alone boolean,
    lanes bigint[], from_x bigint[], from_n bigint[], late_x bigint[]
) RETURNS TABLE (
    id uuid, type text, queue text, priority smallint, payload jsonb, attempts smallint,
    max_attempts smallint, generation integer, cancel_reason text,
    fence bigint, snapshot text, read_lanes bigint[], last_x bigint[], last_n bigint[],
    read_to_end boolean[], alone_waiting boolean, due_in float8, waited float8
)
LANGUAGE plpgsql
SET enable_hashjoin = off
SET enable_mergejoin = off
SET enable_seqscan = off
SET enable_bitmapscan = off
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
        )::float8,
        NULL::float8;
    IF taken > 0 THEN
        RETURN QUERY SELECT
            t.id, t.type, t.queue, t.priority, t.payload, t.attempts,
            t.max_attempts, t.generation, q.reason,
            NULL::bigint, NULL::text, NULL::bigint[], NULL::bigint[], NULL::bigint[],
            NULL::boolean[], NULL::boolean, NULL::float8,
            extract(epoch FROM at - t.scheduled_for)::float8
        FROM unnest(ids) WITH ORDINALITY AS u (id, ordinal)
        JOIN windlass.task t ON t.id = ANY (ARRAY[u.id])
        LEFT JOIN windlass.cancel_request q ON q.task_id = ANY (ARRAY[u.id])
        ORDER BY u.ordinal;
    END IF;
END
$$;
