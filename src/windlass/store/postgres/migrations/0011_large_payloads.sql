-- Large payloads rest in a table of their own, from the enqueue until the record of the task goes. In the row
-- of the task they would be written again when it ends, and that twice: where it comes from, and where it rests.

CREATE TABLE windlass.large_payload (
    task_id uuid PRIMARY KEY,
    -- As text: workers want nothing else, and to write out a large jsonb takes as long as all the rest.
    payload text NOT NULL CHECK (jsonb_typeof(payload::jsonb) = 'object')
);

-- is_large: whether it is kept there. About what PostgreSQL would store beside the row.
CREATE FUNCTION windlass.is_large(payload text) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$SELECT octet_length(payload) > 2000$$;

-- Of these the row has NULL.
ALTER TABLE windlass.task ALTER COLUMN payload DROP NOT NULL;
ALTER TABLE windlass.history ALTER COLUMN payload DROP NOT NULL;
ALTER TABLE windlass.dead ALTER COLUMN payload DROP NOT NULL;

-- Who may do so with tasks may do so with their payloads.
DO $$
DECLARE
    granted record;
BEGIN
    FOR granted IN
        SELECT a.privilege_type AS privilege,
            CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE a.grantee::regrole::text END AS role
        FROM pg_class c
        CROSS JOIN aclexplode(c.relacl) a
        WHERE c.oid = 'windlass.task'::regclass AND a.grantee <> c.relowner
            AND a.privilege_type IN ('SELECT', 'INSERT', 'DELETE')
    LOOP
        EXECUTE format('GRANT %s ON windlass.large_payload TO %s', granted.privilege, granted.role);
    END LOOP;
END
$$;

CREATE OR REPLACE VIEW windlass.tasks AS
SELECT
    t.id, t.type, t.queue,
    coalesce(t.payload, (SELECT l.payload::jsonb FROM windlass.large_payload l WHERE l.task_id = t.id)) AS payload,
    (CASE
        WHEN r.task_id IS NOT NULL THEN 'pending'
        WHEN s.task_id IS NOT NULL THEN 'scheduled'
        WHEN u.task_id IS NOT NULL THEN 'running'
        ELSE 'claimed'
    END)::windlass.task_status AS status,
    t.priority, t.idempotency_key,
    c.worker_id, t.created_at, t.scheduled_for, c.claimed_at, u.started_at,
    NULL::timestamptz AS completed_at,
    greatest(t.created_at, c.claimed_at, u.started_at, a.ended_at) AS updated_at,
    t.attempts, t.max_attempts,
    a.error ->> 'message' AS last_error,
    NULL::jsonb AS result,
    t.tags, t.generation
FROM windlass.task t
LEFT JOIN windlass.ready r ON r.task_id = t.id
LEFT JOIN windlass.scheduled s ON s.task_id = t.id
LEFT JOIN windlass.running u ON u.task_id = t.id AND u.generation = t.generation
LEFT JOIN (
    SELECT c.worker_id, c.claimed_at, k.task_id, k.generation
    FROM windlass.claim c
    JOIN windlass.claim_task b ON b.token = c.token
    CROSS JOIN LATERAL unnest(b.task_ids, b.generations) AS k (task_id, generation)
) c ON c.task_id = t.id AND c.generation = t.generation
LEFT JOIN LATERAL (
    SELECT f.error, f.ended_at
    FROM windlass.attempt f
    WHERE t.generation > 1 AND f.task_id = t.id
    ORDER BY f.generation DESC
    LIMIT 1
) a ON true
UNION ALL
SELECT
    h.id, h.type, h.queue,
    coalesce(h.payload, (SELECT l.payload::jsonb FROM windlass.large_payload l WHERE l.task_id = h.id)),
    h.status, h.priority, h.idempotency_key, h.worker_id,
    h.created_at, h.scheduled_for, h.claimed_at, h.started_at, h.completed_at, h.completed_at,
    h.attempts, h.max_attempts, h.last_error, h.result, h.tags, h.generation
FROM windlass.history h
UNION ALL
SELECT
    d.id, d.type, d.queue,
    coalesce(d.payload, (SELECT l.payload::jsonb FROM windlass.large_payload l WHERE l.task_id = d.id)),
    d.status, d.priority, d.idempotency_key, d.worker_id,
    d.created_at, d.scheduled_for, d.claimed_at, d.started_at, d.completed_at, d.completed_at,
    d.attempts, d.max_attempts, d.last_error, d.result, d.tags, d.generation
FROM windlass.dead d;

-- drop_history_partition: forget the keys, tags and large payloads of a detached partition's tasks, and drop it.
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
    EXECUTE format('DROP TABLE %I.%I', home, name);
END
$$;
