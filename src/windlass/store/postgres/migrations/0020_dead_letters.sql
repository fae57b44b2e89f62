-- Dead letters: found by when they ended, replayed as new tasks, and removed by whoever says so.

-- Which task is a replay of which; written by replays alone. Kept while there is a record of either: a letter
-- was replayed, also if what became of that is forgotten first.
CREATE TABLE windlass.replay (
    task_id uuid PRIMARY KEY,
    ancestor uuid NOT NULL,  -- may be gone by now
    generation integer NOT NULL,  -- of the ancestor: reopened and dead again, it may be replayed again
    depth integer NOT NULL CHECK (depth > 0),  -- replays from the first of all ancestors to this task
    replayed_at timestamptz NOT NULL
);

CREATE INDEX replay_ancestor ON windlass.replay (ancestor, generation);

-- In the order in which they ended, which no id knows: a task may have waited for its time for months. The
-- queue is for counting without a look at the rows.
CREATE INDEX dead_ended ON windlass.dead (completed_at, id) INCLUDE (queue);

-- Who may read dead tasks may read which were replayed.
DO $$
DECLARE
    granted record;
BEGIN
    FOR granted IN
        SELECT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE a.grantee::regrole::text END AS role
        FROM pg_class c
        CROSS JOIN aclexplode(c.relacl) a
        WHERE c.oid = 'windlass.dead'::regclass AND a.grantee <> c.relowner AND a.privilege_type = 'SELECT'
    LOOP
        EXECUTE format('GRANT SELECT ON windlass.replay TO %s', granted.role);
    END LOOP;
END
$$;

-- replay_dead: make a new task of each dead one that was not replayed since it ended, or of each with `again`.
-- Arrays run in parallel; each dead task is named once; a payload that is NULL is that of the dead task.
-- Answers for each: 'replayed', also if an earlier call did it under this id; 'before', and the last replay;
-- 'held' by another transaction; 'absent'. Locks dead tasks, and waits for none.
CREATE FUNCTION windlass.replay_dead(
    ancestors uuid[], new_ids uuid[], delays float8[], payloads text[], again boolean
) RETURNS TABLE (answer text, task_id uuid)
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_hashjoin = off
SET enable_mergejoin = off
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
            array_agg(k.retention_seconds ORDER BY k.ordinal) AS retentions
        FROM (
            SELECT
                u.ordinal, u.new_id, u.delay, d.type, d.queue, d.priority, d.max_attempts,
                d.retention_seconds, to_jsonb(d.tags)::text AS tags,
                coalesce(u.payload, d.payload::text, l.payload) AS payload,
                sum(coalesce(octet_length(u.payload), octet_length(l.payload), 2000))
                    OVER (ORDER BY u.ordinal) / (64 << 20) AS number
            FROM unnest(ancestors, new_ids, delays, payloads, answers) WITH ORDINALITY
                AS u (ancestor, new_id, delay, payload, answer, ordinal)
            JOIN windlass.dead d ON d.id = ANY (ARRAY[u.ancestor])
            LEFT JOIN windlass.large_payload l ON d.payload IS NULL AND l.task_id = ANY (ARRAY[d.id])
            WHERE u.answer = 'new'
        ) k
        GROUP BY k.number
        ORDER BY k.number
    LOOP
        PERFORM FROM windlass.enqueue_tasks(
            part.ids, part.types, part.queues, part.priorities, part.payloads, part.max_attempts,
            part.delays, NULL, NULL, part.tag_lists, part.retentions, NULL, NULL, NULL, false, false
        );
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

-- forget_lineage: forget which of these tasks, whose records are gone, were replays or were replayed, unless
-- there is a record of the other.
CREATE FUNCTION windlass.forget_lineage(gone uuid[]) RETURNS void
LANGUAGE sql
SET search_path = pg_catalog, pg_temp
SET enable_seqscan = off
SET jit = off
AS $$
DELETE FROM windlass.replay r
USING (
    SELECT p.task_id, p.ancestor AS other FROM windlass.replay p WHERE p.task_id = ANY (gone)
    UNION
    SELECT p.task_id, p.task_id FROM windlass.replay p WHERE p.ancestor = ANY (gone)
) k
WHERE r.task_id = k.task_id
    AND NOT EXISTS (SELECT FROM windlass.task t WHERE t.id = k.other)
    AND NOT EXISTS (SELECT FROM windlass.dead d WHERE d.id = k.other)
    AND NOT EXISTS (SELECT FROM windlass.history h WHERE h.id = k.other)
$$;

-- remove_dead: remove dead tasks, with their keys, tags, payloads and lineage; returns which, without those
-- that are gone or held by another transaction. Waits for none.
CREATE FUNCTION windlass.remove_dead(removed uuid[]) RETURNS SETOF uuid
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
SET enable_hashjoin = off
SET enable_mergejoin = off
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
    )
    SELECT g.id FROM gone g;
    PERFORM set_config('windlass_internal.removing', 'off', true);
    PERFORM windlass.forget_lineage(locked);
END
$$;

-- drop_history_partition: forget the keys, tags, large payloads and lineage of a detached partition's tasks,
-- and drop it.
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
    EXECUTE format('DROP TABLE %I.%I', home, name);
END
$$;
