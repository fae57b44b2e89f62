-- Claims and settlements by columns: what a batch has in common is said once, and nothing is looked up
-- that no task of it uses. The functions of before stay for processes that a deployment has yet to replace.

-- Their plans are the same for every call, and are made once by each session: for one task that took longer
-- than all the rest.

-- Compressing the ids of a claim took a tenth of its time, and saved little: they are random.
ALTER TABLE windlass.claim_task
    ALTER COLUMN task_ids SET STORAGE EXTERNAL,
    ALTER COLUMN generations SET STORAGE EXTERNAL;

-- claim_batches: grant up to `wanted` ready tasks under one lease.
-- `lanes`, `from_x`, `from_n` say where the caller's last look at each lane ended; a lane that is
-- not among them is read from its beginning. `late_x` are transactions that were still open
-- when those looks went past them and have ended since: their rows lie behind.
-- Returns a row for each lane it took tasks of, with a column of each value, in the lane's order; and
-- last (type NULL) what it saw: the snapshot, the lanes read, and which tasks are to be cancelled.
-- Waits for nothing: a locked row is skipped, so the caller has to come back for it.
CREATE FUNCTION windlass.claim_batches(
    worker uuid, new_token uuid, types text[], queues text[], wanted integer, lease interval,
    ageing interval, alone boolean,
    lanes bigint[], from_x bigint[], from_n bigint[], late_x bigint[]
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
BEGIN
    FOR head IN
        SELECT
            l.lane, l.type, l.queue, l.priority, l.kind,
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
                SELECT r.ctid AS place
                FROM windlass.ready r
                WHERE r.lane = head.lane AND (r.x, r.n) > (after_x, after_n) AND r.x <= until_x
                ORDER BY r.x, r.n
                LIMIT wanted - taken
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
                ended := batch.tasks < wanted - taken;
            END IF;
            CONTINUE WHEN batch.tasks = 0;
            ids := ids || batch.ids;
            generations := generations || batch.generations;
            taken := taken + batch.tasks;
            RETURN QUERY SELECT
                head.type, head.queue, head.priority, batch.ids, batch.payloads, batch.attempts,
                batch.max_attempts, batch.generations, batch.waited,
                NULL::bigint, NULL::text, NULL::bigint[], NULL::bigint[], NULL::bigint[],
                NULL::boolean[], NULL::boolean, NULL::float8, NULL::uuid[], NULL::text[];
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
            SELECT date_part('epoch', min(s.due) - windlass.clock())
            FROM windlass.scheduled s
            WHERE s.due > (SELECT windlass.clock() - interval '2 seconds')
        ),
        cancelled, reasons;
END
$$;

-- claim_lane: the same for a worker that had nothing left to claim when a wake-up named this lane: no other
-- is looked at, and what is due later neither. To begin the statement of claim_batches that compares the lanes
-- takes longer than all that is done here.
-- Returns one row, with no tasks if there are none or the lane is not the worker's to read.
CREATE FUNCTION windlass.claim_lane(
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

-- claim_tasks: the same for processes of before: the report, and then a row for each task.
CREATE OR REPLACE FUNCTION windlass.claim_tasks(
    worker uuid, new_token uuid, types text[], queues text[], wanted integer, lease interval,
    ageing interval, alone boolean,
    lanes bigint[], from_x bigint[], from_n bigint[], late_x bigint[]
) RETURNS TABLE (
    id uuid, type text, queue text, priority smallint, payload jsonb, attempts smallint,
    max_attempts smallint, generation integer, cancel_reason text,
    fence bigint, snapshot text, read_lanes bigint[], last_x bigint[], last_n bigint[],
    read_to_end boolean[], alone_waiting boolean, due_in float8, waited float8
)
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

-- settle_batch: apply what became of tasks whose claim and generation still hold.
-- `which` says of each task which of the `tokens` is its claim's, from 1; `outcomes` are those of Outcome
-- in Python. NULL are `which` if there is one token, `generations` if all are 1, `outcomes` if all are
-- completed, and `results`, `delays`, `errors` and `reported` if none has one.
-- Returns, of those not applied, the place in the call and whether they had been applied before.
-- Holds claims FOR KEY SHARE while it may wait for tasks, so heartbeats go on and a rescue
-- keeps away; counts `remaining` down last.
CREATE FUNCTION windlass.settle_batch(
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

        -- Nearly every task: its first attempt has completed, and was too short to be reported.
        WITH ended AS (
            DELETE FROM windlass.task t
            USING unnest(task_ids, outcomes, results) WITH ORDINALITY AS u (task_id, outcome, result, ordinal)
            WHERE t.id = ANY (ARRAY[u.task_id]) AND t.generation = 1 AND generations[u.ordinal] = 1
                AND held[which[u.ordinal]] IS NOT NULL
                AND (outcomes IS NULL OR u.outcome = 'completed')
                AND (reported IS NULL OR NOT reported[u.ordinal])
            RETURNING
                t.id, t.type, t.queue, t.priority, t.max_attempts, t.attempts, t.generation,
                t.retention_seconds, t.created_at, t.scheduled_for, t.idempotency_key, t.payload, t.tags,
                u.result, u.ordinal
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
                e.result::jsonb
            FROM ended e
        )
        SELECT coalesce(array_agg(e.ordinal), '{}') INTO settled FROM ended e;
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
                USING unnest(which, task_ids) WITH ORDINALITY AS u (which, task_id, ordinal)
                WHERE w.token = tokens[u.which] AND w.task_id = u.task_id AND u.ordinal <> ALL (settled)
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
    END IF;

    IF cardinality(settled) < cardinality(task_ids) THEN
        RETURN QUERY
        SELECT u.ordinal::integer - 1,
            EXISTS (SELECT FROM windlass.history h WHERE h.id = u.task_id AND h.token = tokens[u.which])
            OR EXISTS (SELECT FROM windlass.dead d WHERE d.id = u.task_id AND d.token = tokens[u.which])
            OR EXISTS (SELECT FROM windlass.task t WHERE t.id = u.task_id AND t.returned_by = tokens[u.which]
                AND t.generation = u.generation + 1)
        FROM unnest(which, task_ids, generations) WITH ORDINALITY AS u (which, task_id, generation, ordinal)
        WHERE u.ordinal <> ALL (settled);
    END IF;
END
$$;
