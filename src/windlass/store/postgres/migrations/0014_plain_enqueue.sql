-- What an enqueue by SQL costs: most have one task with nothing but a payload, and nothing wrong with it.

-- enqueue_checked: enqueue, with a look at every option.
CREATE FUNCTION windlass.enqueue_checked(
    type text, payload jsonb, queue text, priority integer, delay float8, at timestamptz,
    idempotency_key text, max_attempts integer, tags text[]
) RETURNS uuid
LANGUAGE sql
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

-- enqueue: add a task with the defaults that workers registered for its type; returns its id, or
-- that of the first task of the same idempotency key.
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
            PERFORM pg_notify('windlass.wake', number::text);
            RETURN added;
        END IF;
    END IF;
    RETURN windlass.enqueue_checked(
        type, payload, queue, priority, delay, at, idempotency_key, max_attempts, tags);
END
$$;
