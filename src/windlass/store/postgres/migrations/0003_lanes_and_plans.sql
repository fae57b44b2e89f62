-- Lanes that rest no longer cost a claim anything; plans that no statistics can spoil; verbs that wait
-- for less and promote in order.
--
-- A table that was analysed while it was empty is taken for one of a single row, whatever it holds
-- since. Then a join on `=` may be made by walking a whole index. A join on `= ANY (ARRAY[…])`
-- means the same, and can only be made by searching the index for one row after the other.

-- Tasks that are due at the same moment are promoted in the order of their ids.
DROP INDEX windlass.scheduled_due;
CREATE INDEX scheduled_due ON windlass.scheduled (due, task_id);

-- A claim that a settlement emptied while another one holds it stays for a moment with nothing left.
ALTER TABLE windlass.claim
    DROP CONSTRAINT claim_remaining_check,
    ADD CONSTRAINT claim_remaining_check CHECK (remaining >= 0);

DROP FUNCTION IF EXISTS windlass.promote_due(integer); -- it says now which tasks it is to promote

-- A lane that has been empty for long rests: claims do not know it. An enqueue that does not see its
-- lane lists it; a task that came in past that is found by the leader (relist_busy_lanes).
ALTER TABLE windlass.lane ADD COLUMN listed_at timestamptz NOT NULL DEFAULT now();
ALTER TABLE windlass.lane ALTER COLUMN listed_at SET DEFAULT windlass.clock();
CREATE INDEX lane_type ON windlass.lane (type);

-- What every lane that ever rested is made of, also of those that are listed again.
CREATE TABLE windlass.resting_lane (
    lane bigint PRIMARY KEY,
    queue text NOT NULL,
    type text NOT NULL,
    priority smallint NOT NULL,
    kind smallint NOT NULL
);

-- retire_lanes: let those rest that were listed so long ago and are empty. Skips what is held.
CREATE FUNCTION windlass.retire_lanes(listed_for interval) RETURNS integer
LANGUAGE plpgsql
SET enable_hashjoin = off
SET enable_mergejoin = off
SET enable_seqscan = off
SET enable_bitmapscan = off
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

-- relist_lanes: list those of these lanes that rest. Adds rows and waits for nobody.
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

-- relist_busy_lanes: list the resting lanes that hold tasks: somebody counted on them while they
-- were being retired.
CREATE FUNCTION windlass.relist_busy_lanes() RETURNS integer
LANGUAGE plpgsql
SET enable_hashjoin = off
SET enable_mergejoin = off
SET enable_seqscan = off
SET enable_bitmapscan = off
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

-- claim_tasks: grant up to `wanted` ready tasks under one lease.
-- `lanes`, `from_x`, `from_n` say where the caller's last look at each lane ended; a lane that is
-- not among them is read from its beginning. `late_x` are transactions that were still open
-- when those looks went past them and have ended since: their rows lie behind.
-- The first row (id NULL) reports the snapshot and the lanes read; the others are the tasks.
-- Waits for nothing: a locked row is skipped, so the caller has to come back for it.
CREATE OR REPLACE FUNCTION windlass.claim_tasks(
    worker uuid, new_token uuid, types text[], queues text[], wanted integer, lease interval,
    ageing interval, alone boolean,
    lanes bigint[], from_x bigint[], from_n bigint[], late_x bigint[]
) RETURNS TABLE (
    id uuid, type text, queue text, priority smallint, payload jsonb, attempts smallint,
    max_attempts smallint, generation integer, cancel_reason text,
    fence bigint, snapshot text, read_lanes bigint[], last_x bigint[], last_n bigint[],
    read_to_end boolean[], alone_waiting boolean, due_in float8
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

-- start_tasks: report tasks as running. Returns those whose claim or generation is gone.
-- Holds claims FOR KEY SHARE: heartbeats go on, a rescue keeps away. Tasks are not locked, so that
-- no settlement waits for a report; one that it overtakes leaves a row that tidying removes.
CREATE OR REPLACE FUNCTION windlass.start_tasks(
    tokens uuid[], task_ids uuid[], generations integer[], started_after float8[]
) RETURNS SETOF uuid
LANGUAGE plpgsql
SET enable_hashjoin = off
SET enable_mergejoin = off
SET enable_seqscan = off
SET enable_bitmapscan = off
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

-- The day on which an ended task may go: not before its idempotency key is forgotten.
-- In UTC before the interval is added, so that no change to summer time moves it.
CREATE OR REPLACE FUNCTION windlass.drop_day(
    ended timestamptz, own_seconds integer, retention interval, key text, key_retention interval
) RETURNS date
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
SELECT ((ended AT TIME ZONE 'UTC') + greatest(
    coalesce(own_seconds * interval '1 second', retention),
    CASE WHEN key IS NOT NULL THEN key_retention ELSE interval '0' END
))::date
$$;

-- settle_tasks: apply what became of tasks whose claim and generation still hold.
-- Returns, of those not applied, the place in the call and whether they had been applied before.
-- Holds claims FOR KEY SHARE while it may wait for tasks, so heartbeats go on and a rescue
-- keeps away; counts `remaining` down last. `outcomes` are those of Outcome in Python.
CREATE OR REPLACE FUNCTION windlass.settle_tasks(
    tokens uuid[], task_ids uuid[], generations integer[], outcomes text[],
    started_after float8[], results text[], delays float8[], errors text[], reported boolean[],
    retention interval, dead_retention interval, key_retention interval, patience interval
) RETURNS TABLE (ordinal integer, before boolean)
LANGUAGE plpgsql
SET enable_hashjoin = off
SET enable_mergejoin = off
SET enable_seqscan = off
SET enable_bitmapscan = off
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

-- rescue_claims: give back the tasks of claims that expired. A claim that somebody holds is left
-- for the next sweep. The lock re-checks the expiry; what else is decided is read after it.
CREATE OR REPLACE FUNCTION windlass.rescue_claims(
    max_claims integer, dead_retention interval, retention interval, key_retention interval
) RETURNS TABLE (claims integer, returned integer, lost_attempts integer, dead integer, cancelled integer)
LANGUAGE plpgsql
SET enable_hashjoin = off
SET enable_mergejoin = off
SET enable_seqscan = off
SET enable_bitmapscan = off
AS $$
#variable_conflict use_column
DECLARE
    expired record;
    sums record;
    at timestamptz;
BEGIN
    claims := 0; returned := 0; lost_attempts := 0; dead := 0; cancelled := 0;
    FOR expired IN
        SELECT c.token, c.worker_id, c.claimed_at
        FROM windlass.claim c
        WHERE c.expires_at <= windlass.clock()
        ORDER BY c.expires_at, c.fence
        LIMIT max_claims
        FOR UPDATE SKIP LOCKED
    LOOP
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
    END LOOP;
    IF returned > 0 THEN
        PERFORM windlass.wake(false);
    END IF;
    RETURN NEXT;
END
$$;

-- promote_due: move due tasks to ready, oldest first; what somebody holds is left for later.
-- Not `all_of_them`: only what came due in the last two seconds, as claim_tasks reports it.
CREATE OR REPLACE FUNCTION windlass.promote_due(max_tasks integer, all_of_them boolean) RETURNS integer
LANGUAGE plpgsql
SET enable_seqscan = off
SET enable_bitmapscan = off
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
