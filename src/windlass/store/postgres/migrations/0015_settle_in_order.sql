-- The tasks of a settlement that completed are found by one walk along the index, in its order, instead of a
-- search for each: a fifth less for a settlement of a thousand.

-- others_than: the numbers from 1 to `last` that are not among these.
CREATE FUNCTION windlass.others_than(these bigint[], last integer) RETURNS bigint[]
LANGUAGE sql IMMUTABLE
RETURN ARRAY(
    SELECT a.n FROM generate_series(1, last::bigint) AS a (n)
    EXCEPT
    SELECT t.n FROM unnest(these) AS t (n)
);

-- complete_batch: end those tasks whose first attempt has completed, and was too short to be reported.
-- Its arguments are those of settle_batch and what that knows of the claims, in the order of its `tokens`.
-- Returns the places of the tasks it ended in the call, from 1.
-- A function of its own for its settings: without nested loops, hashes and scans of whole tables all that is left
-- is to merge, by the order of ids, whatever the planner believes about the table.
CREATE FUNCTION windlass.complete_batch(
    held uuid[], workers uuid[], claim_times timestamptz[],
    which smallint[], task_ids uuid[], generations integer[], started_after float8[],
    outcomes text[], results text[], reported boolean[],
    at timestamptz, usual_day date, retention interval, key_retention interval
) RETURNS bigint[]
LANGUAGE plpgsql
SET enable_nestloop = off
SET enable_hashjoin = off
SET enable_mergejoin = on  -- off in the function that calls it
SET enable_sort = on
SET enable_seqscan = off
SET enable_bitmapscan = off
SET plan_cache_mode = force_generic_plan
SET jit = off
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

-- settle_batch: apply what became of tasks whose claim and generation still hold.
-- `which` says of each task which of the `tokens` is its claim's, from 1; `outcomes` are those of Outcome
-- in Python. NULL are `which` if there is one token, `generations` if all are 1, `outcomes` if all are
-- completed, and `results`, `delays`, `errors` and `reported` if none has one.
-- Returns, of those not applied, the place in the call and whether they had been applied before.
-- Holds claims FOR KEY SHARE while it may wait for tasks, so heartbeats go on and a rescue
-- keeps away; counts `remaining` down last.
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
