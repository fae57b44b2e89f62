-- What an idle worker's first task costs: a wake-up names it, so that nothing has to be looked for, and
-- its enqueue lets it be seen before it waits for the disk.

-- claim_one: grant the task that a wake-up named, if it is ready and this worker's; else nothing.
-- If one before it waits in its lane nothing is granted either, and `is_behind` says that the lane is to be read:
-- behind the bound that the worker has there. Anybody may send a notification, so what it names is not believed.
-- A task of the first generation has never been claimed: it is no suspect, and no worker was asked to cancel it.
CREATE FUNCTION windlass.claim_one(
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
                AND EXISTS (
                    SELECT
                    FROM windlass.ready o
                    WHERE o.lane = named_lane AND (o.x, o.n) > (after_x, after_n) AND (o.x, o.n) < (r.x, r.n)
                    OFFSET 0
                )
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

-- enqueue_now: add a task that is due now and has no key and no tag, and return once it is on the disk.
-- A worker that waits for it may see it before: it claims it while this session waits for the disk, and starts
-- it no sooner than its claim is there, which comes later in the log. Whoever else sees it meanwhile and
-- answers for it has to wait as well (enqueue_tasks.sql). The lock that a notification needs, one for all of a
-- server, is not held during the wait.
-- A procedure that commits can set nothing for itself; it runs with the rights of who calls it.
CREATE PROCEDURE windlass.enqueue_now(
    task_id uuid, payload text, type text, queue text, priority smallint, max_attempts smallint,
    retention integer
)
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

-- enqueue: as it was, but that it names the task to whoever waits.
CREATE OR REPLACE FUNCTION windlass.enqueue(
    type text, payload jsonb DEFAULT '{}', queue text DEFAULT NULL, priority integer DEFAULT NULL,
    delay float8 DEFAULT NULL, at timestamptz DEFAULT NULL, idempotency_key text DEFAULT NULL,
    max_attempts integer DEFAULT NULL, tags text[] DEFAULT NULL
) RETURNS uuid
LANGUAGE plpgsql
SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
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
    IF delay IS NULL AND at IS NULL AND idempotency_key IS NULL AND tags IS NULL
        AND length(type) BETWEEN 1 AND 200 AND type !~ control
        AND coalesce(length(queue) BETWEEN 1 AND 200 AND queue !~ control, true)
        AND coalesce(priority BETWEEN 0 AND 100, true)
        AND coalesce(max_attempts BETWEEN 1 AND 30000, true)
        AND jsonb_typeof(payload) = 'object'
        AND pg_column_size(payload) < 1000  -- the text of a longer one could be of gigabytes
    THEN
        SELECT s.max_payload_bytes, t.queue, t.priority, t.max_attempts, t.retention_seconds INTO known
        FROM windlass.setting s
        LEFT JOIN windlass.task_type t ON t.name = type
        WHERE s.only_row;
        -- What is in a payload of less than 300 bytes is neither too deep nor too long.
        IF octet_length(payload::text) <= least(299, known.max_payload_bytes) THEN
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
        type, payload, queue, priority, delay, at, idempotency_key, max_attempts, tags);
END
$$;
