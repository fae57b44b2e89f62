-- One row that somebody holds must not stop every rescue: each claim is rescued in a block of its own.

-- rescue_claims: give back the tasks of claims that expired. A claim that somebody holds is left
-- for the next sweep, and so is one of which they hold another row. The lock re-checks the expiry;
-- what else is decided is read after it.
CREATE OR REPLACE FUNCTION windlass.rescue_claims(
    max_claims integer, dead_retention interval, retention interval, key_retention interval
) RETURNS TABLE (claims integer, returned integer, lost_attempts integer, dead integer, cancelled integer)
LANGUAGE plpgsql
SET enable_hashjoin = off
SET enable_mergejoin = off
SET enable_seqscan = off
SET enable_bitmapscan = off
SET lock_timeout = '100ms'
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
