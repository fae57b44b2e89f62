-- Stopping the retries of a type ends those too that wait as pending, and looks at each task once.

-- why_stopped: why retries of a type are stopped; NULL if they are not.
CREATE FUNCTION windlass.why_stopped(stopped text) RETURNS text
LANGUAGE sql STABLE
AS $$
SELECT 'retries of this type are stopped: ' || s.reason FROM windlass.stopped_type s WHERE s.type = stopped
$$;

-- lane_of_type: the first lane of a type from a number on; NULL if there is none.
CREATE FUNCTION windlass.lane_of_type(wanted text, from_lane bigint) RETURNS bigint
LANGUAGE sql STABLE
AS $$
SELECT min(l.lane)
FROM (
    SELECT k.lane FROM windlass.lane k WHERE k.type = wanted AND k.lane >= from_lane
    UNION ALL SELECT r.lane FROM windlass.resting_lane r WHERE r.type = wanted AND r.lane >= from_lane
) l
$$;

-- bury_tasks: end tasks that wait for another attempt and whose rows are held; their places are gone. They say why, and
-- which claim has ended them, if one has.
CREATE FUNCTION windlass.bury_tasks(
    buried uuid[], why text, ended_by uuid, dead_retention interval, key_retention interval
) RETURNS void
LANGUAGE plpgsql
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
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
    PERFORM windlass.call_back(buried);
END
$$;

-- bury_scheduled: end tasks of a type whose retries are stopped and that wait for the time of theirs: looks at so many
-- of a lane of the type, from a task on, and says where to go on; a NULL lane: that was the last one. Goes round what
-- somebody holds. Locks scheduled rows, then tasks, each sorted by id. Took the place of bury_retries, which begins anew
-- each time and stays for processes that run through the upgrade.
CREATE FUNCTION windlass.bury_scheduled(
    stopped text, from_lane bigint, from_id uuid, max_looks integer, max_tasks integer,
    dead_retention interval, key_retention interval
) RETURNS TABLE (buried integer, next_lane bigint, next_id uuid)
LANGUAGE plpgsql
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
SET jit = off
SET lock_timeout = '2s'
AS $$
DECLARE
    why constant text := windlass.why_stopped(stopped);
    nobody constant uuid := '00000000-0000-0000-0000-000000000000';
    here constant bigint := windlass.lane_of_type(stopped, from_lane);
    is_end boolean;  -- of the lane
    came_again uuid[];
    taken uuid[];
BEGIN
    buried := 0;
    IF why IS NULL OR here IS NULL THEN
        RETURN NEXT;
        RETURN;
    END IF;

    -- A first attempt is of the first generation: most tasks are passed over without a look at their own rows. No
    -- equation: by one the server would know that the order of ids is enough, and might read all other lanes too.
    WITH seen AS MATERIALIZED (
        SELECT w.task_id, w.generation
        FROM windlass.scheduled w
        WHERE w.lane BETWEEN here AND here
            AND (w.lane, w.task_id) > (here, CASE WHEN here = from_lane THEN from_id ELSE nobody END)
        ORDER BY w.lane, w.task_id
        LIMIT max_looks
    ), counted AS (
        SELECT s.*, count(*) FILTER (WHERE s.generation > 1) OVER (ORDER BY s.task_id) AS found
        FROM seen s
    ), page AS (
        SELECT
            array_agg(c.task_id) FILTER (WHERE c.generation > 1) AS ids, count(*) AS looks,
            (array_agg(c.task_id ORDER BY c.task_id DESC))[1] AS last
        FROM counted c
        WHERE c.found <= max_tasks
    )
    SELECT p.ids, here, p.last, p.looks < max_looks AND p.looks = (SELECT count(*) FROM seen)
    INTO came_again, next_lane, next_id, is_end
    FROM page p;
    IF is_end THEN
        next_lane := here + 1;
        next_id := nobody;
    END IF;

    IF came_again IS NOT NULL THEN
        SELECT array_agg(f.task_id) INTO taken
        FROM (
            SELECT w.task_id FROM windlass.scheduled w WHERE w.task_id = ANY (came_again)
            ORDER BY w.task_id FOR UPDATE SKIP LOCKED
        ) f;
        SELECT array_agg(f.id) INTO taken
        FROM (
            SELECT t.id FROM windlass.task t WHERE t.id = ANY (taken) AND t.attempts > 0
            ORDER BY t.id FOR UPDATE SKIP LOCKED
        ) f;
    END IF;
    IF taken IS NOT NULL THEN
        DELETE FROM windlass.scheduled w WHERE w.task_id = ANY (taken);
        PERFORM windlass.bury_tasks(taken, why, NULL, dead_retention, key_retention);
        buried := cardinality(taken);
    END IF;
    RETURN NEXT;
END
$$;

-- bury_ready: the same for tasks that became ready again: looks at so many of a lane of the type, from a position on,
-- and says where to go on; a NULL lane: that was the last one. Goes round what somebody holds. Locks ready rows, then
-- tasks, each sorted by id.
CREATE FUNCTION windlass.bury_ready(
    stopped text, from_lane bigint, from_x bigint, from_n bigint, max_looks integer, max_tasks integer,
    dead_retention interval, key_retention interval
) RETURNS TABLE (buried integer, next_lane bigint, next_x bigint, next_n bigint)
LANGUAGE plpgsql
SET enable_seqscan = off
SET enable_bitmapscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
SET jit = off
SET lock_timeout = '2s'
AS $$
DECLARE
    why constant text := windlass.why_stopped(stopped);
    here constant bigint := windlass.lane_of_type(stopped, from_lane);
    after_x xid8 := '0';
    after_n bigint := 0;
    is_end boolean;  -- of the lane
    came_again uuid[];
    taken uuid[];
BEGIN
    buried := 0;
    IF why IS NULL OR here IS NULL THEN
        RETURN NEXT;
        RETURN;
    END IF;
    IF here = from_lane THEN
        after_x := from_x::text::xid8;
        after_n := from_n;
    END IF;

    -- A first attempt is of the first generation: most tasks are passed over without a look at their own rows.
    WITH seen AS MATERIALIZED (
        SELECT r.task_id, r.generation, r.x, r.n
        FROM windlass.ready r
        WHERE r.lane = here AND (r.x, r.n) > (after_x, after_n)
        ORDER BY r.lane, r.x, r.n
        LIMIT max_looks
    ), counted AS (
        SELECT s.*, count(*) FILTER (WHERE s.generation > 1) OVER (ORDER BY s.x, s.n) AS found
        FROM seen s
    ), page AS (
        SELECT
            array_agg(c.task_id) FILTER (WHERE c.generation > 1) AS ids, count(*) AS looks,
            (array_agg(c.x ORDER BY c.x DESC, c.n DESC))[1] AS x,
            (array_agg(c.n ORDER BY c.x DESC, c.n DESC))[1] AS n
        FROM counted c
        WHERE c.found <= max_tasks
    )
    SELECT p.ids, here, p.x::text::bigint, p.n, p.looks < max_looks AND p.looks = (SELECT count(*) FROM seen)
    INTO came_again, next_lane, next_x, next_n, is_end
    FROM page p;
    IF is_end THEN
        next_lane := here + 1;
        next_x := 0;
        next_n := 0;
    END IF;

    IF came_again IS NOT NULL THEN
        SELECT array_agg(f.task_id) INTO taken
        FROM (
            SELECT r.task_id FROM windlass.ready r WHERE r.task_id = ANY (came_again)
            ORDER BY r.task_id FOR UPDATE SKIP LOCKED
        ) f;
        SELECT array_agg(f.id) INTO taken
        FROM (
            SELECT t.id FROM windlass.task t WHERE t.id = ANY (taken) AND t.attempts > 0
            ORDER BY t.id FOR UPDATE SKIP LOCKED
        ) f;
    END IF;
    IF taken IS NOT NULL THEN
        DELETE FROM windlass.ready r WHERE r.task_id = ANY (taken);
        PERFORM windlass.bury_tasks(taken, why, NULL, dead_retention, key_retention);
        buried := cardinality(taken);
    END IF;
    RETURN NEXT;
END
$$;
