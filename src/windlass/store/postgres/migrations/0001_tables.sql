-- The tables, each narrow and for one purpose. Where a task is says what state it is in:
-- ready, scheduled, a claim (and running), history or dead.

CREATE TYPE windlass.task_status AS ENUM (
    'scheduled', 'blocked', 'pending', 'claimed', 'running',
    'completed', 'failed', 'dead', 'cancelled'
);

-- The only clock. Inlined by the planner; a test that moves time replaces it.
CREATE FUNCTION windlass.clock() RETURNS timestamptz
LANGUAGE sql VOLATILE PARALLEL SAFE
AS 'SELECT clock_timestamp()';

-- A lane's number is a hash of what it is, so that an enqueue needs no row of it.
-- Names hold no control characters, so the separator cannot be forged.
CREATE FUNCTION windlass.lane_number(queue text, type text, priority smallint, kind smallint)
RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
SELECT hashtextextended(
    (queue || E'\x1f' || type || E'\x1f' || priority::text || E'\x1f' || kind::text) COLLATE "C",
    0
)
$$;

-- Live tasks: what was asked, and how far it got.
CREATE TABLE windlass.task (
    id uuid PRIMARY KEY,
    type text NOT NULL,
    queue text NOT NULL,
    priority smallint NOT NULL CHECK (priority BETWEEN 0 AND 100),
    max_attempts smallint NOT NULL CHECK (max_attempts > 0),
    attempts smallint NOT NULL DEFAULT 0 CHECK (attempts >= 0),
    recoveries smallint NOT NULL DEFAULT 0 CHECK (recoveries >= 0),
    generation integer NOT NULL DEFAULT 1 CHECK (generation > 0),
    retention_seconds integer CHECK (retention_seconds >= 0),
    created_at timestamptz NOT NULL,
    scheduled_for timestamptz NOT NULL,
    returned_by uuid, -- the token of the claim that last gave it back: answers a repeated settlement
    idempotency_key text,
    payload jsonb NOT NULL CHECK (jsonb_typeof(payload) = 'object'),
    tags text[],
    CONSTRAINT attempts_are_left CHECK (attempts < max_attempts)
);

-- Claimable tasks. Rows are only ever inserted and deleted, never updated.
-- Order within a lane: the transaction that made the row ready, then n.
CREATE TABLE windlass.ready (
    lane bigint NOT NULL,
    x xid8 NOT NULL DEFAULT pg_current_xact_id(),
    n bigint NOT NULL GENERATED ALWAYS AS IDENTITY (CACHE 100),
    task_id uuid NOT NULL,
    generation integer NOT NULL,
    ready_at timestamptz NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 1000);
CREATE INDEX ready_order ON windlass.ready (lane, x, n);
CREATE UNIQUE INDEX ready_task ON windlass.ready (task_id);

-- Tasks that wait for their time.
CREATE TABLE windlass.scheduled (
    task_id uuid PRIMARY KEY,
    lane bigint NOT NULL,
    generation integer NOT NULL,
    due timestamptz NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 1000);
CREATE INDEX scheduled_due ON windlass.scheduled (due);

-- The list of lanes. No unique constraint: it would make an enqueue into a new lane wait for
-- an uncommitted twin. An enqueue that does not see its lane adds it; the leader drops doubles.
CREATE TABLE windlass.lane (
    lane bigint NOT NULL,
    queue text NOT NULL,
    type text NOT NULL,
    priority smallint NOT NULL,
    kind smallint NOT NULL CHECK (kind BETWEEN 0 AND 2)
);
CREATE INDEX lane_number ON windlass.lane (lane);

-- Leases: one narrow row per batch, updated by heartbeats, so the expiry is not indexed.
CREATE TABLE windlass.claim (
    token uuid PRIMARY KEY,
    fence bigint NOT NULL GENERATED ALWAYS AS IDENTITY,
    worker_id uuid NOT NULL,
    claimed_at timestamptz NOT NULL,
    expires_at timestamptz NOT NULL,
    remaining integer NOT NULL CHECK (remaining > 0)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 1000);

-- What a claim holds: written once, never updated.
CREATE TABLE windlass.claim_task (
    token uuid PRIMARY KEY,
    task_ids uuid[] NOT NULL,
    generations integer[] NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 1000);

-- Tasks that have run for about a second: short ones never pay for it.
CREATE TABLE windlass.running (
    task_id uuid PRIMARY KEY,
    generation integer NOT NULL,
    token uuid NOT NULL,
    started_at timestamptz NOT NULL
);

-- Cancellations asked of workers: appended, so that asking waits for nobody.
CREATE TABLE windlass.cancel_request (
    task_id uuid PRIMARY KEY,
    reason text NOT NULL,
    requested_at timestamptz NOT NULL
);

-- Failed attempts of live tasks. When a task ends they move into its row.
CREATE TABLE windlass.attempt (
    task_id uuid NOT NULL,
    generation integer NOT NULL,
    attempt smallint NOT NULL,
    worker_id uuid,
    started_at timestamptz,
    ended_at timestamptz NOT NULL,
    error jsonb NOT NULL,
    PRIMARY KEY (task_id, generation)
);

-- Completed and cancelled tasks, by the day on which they may go. Partitions are made ahead;
-- each has a unique index on id. There is no default partition: it would stop detaching.
CREATE TABLE windlass.history (
    id uuid NOT NULL,
    type text NOT NULL,
    queue text NOT NULL,
    status windlass.task_status NOT NULL CHECK (status IN ('completed', 'cancelled')),
    priority smallint NOT NULL,
    max_attempts smallint NOT NULL,
    attempts smallint NOT NULL,
    generation integer NOT NULL,
    retention_seconds integer,
    drop_on date NOT NULL,
    created_at timestamptz NOT NULL,
    scheduled_for timestamptz NOT NULL,
    claimed_at timestamptz,
    started_at timestamptz,
    completed_at timestamptz NOT NULL,
    worker_id uuid,
    token uuid,
    idempotency_key text,
    payload jsonb NOT NULL,
    tags text[],
    result jsonb,
    last_error text,
    errors jsonb
) PARTITION BY RANGE (drop_on);

-- Failed and dead tasks rest apart: other retention, search, people who look at them.
CREATE TABLE windlass.dead (
    id uuid PRIMARY KEY,
    type text NOT NULL,
    queue text NOT NULL,
    status windlass.task_status NOT NULL CHECK (status IN ('failed', 'dead')),
    priority smallint NOT NULL,
    max_attempts smallint NOT NULL,
    attempts smallint NOT NULL,
    generation integer NOT NULL,
    retention_seconds integer,
    drop_on date NOT NULL,
    created_at timestamptz NOT NULL,
    scheduled_for timestamptz NOT NULL,
    claimed_at timestamptz,
    started_at timestamptz,
    completed_at timestamptz NOT NULL,
    worker_id uuid,
    token uuid,
    idempotency_key text,
    payload jsonb NOT NULL,
    tags text[],
    result jsonb,
    last_error text,
    errors jsonb
);
CREATE INDEX dead_drop_on ON windlass.dead (drop_on);

-- First task of each (type, key). Removed only after the task.
CREATE TABLE windlass.idempotency (
    type text NOT NULL,
    key text NOT NULL,
    task_id uuid NOT NULL,
    fingerprint bigint NOT NULL,
    PRIMARY KEY (type, key)
);

CREATE TABLE windlass.queue (
    name text PRIMARY KEY,
    paused_at timestamptz
);

-- What workers registered of the types they handle: the last registration wins.
CREATE TABLE windlass.task_type (
    name text PRIMARY KEY,
    queue text NOT NULL,
    priority smallint NOT NULL CHECK (priority BETWEEN 0 AND 100),
    max_attempts smallint NOT NULL CHECK (max_attempts > 0),
    retention_seconds integer,
    registered_at timestamptz NOT NULL
);

-- What a worker said of itself when it started, and apart from it what changes.
CREATE TABLE windlass.worker (
    id uuid PRIMARY KEY,
    host text NOT NULL,
    pid integer NOT NULL,
    version text NOT NULL,
    capacity integer NOT NULL,
    types text[] NOT NULL,
    queues text[],
    started_at timestamptz NOT NULL
);
CREATE TABLE windlass.worker_pulse (
    worker_id uuid PRIMARY KEY,
    heartbeat_at timestamptz NOT NULL,
    expires_at timestamptz NOT NULL,
    running integer NOT NULL,
    idle boolean NOT NULL
) WITH (fillfactor = 50);

-- One seat that all candidates contend for, and a term that only grows.
CREATE TABLE windlass.leadership (
    seat boolean PRIMARY KEY DEFAULT true CHECK (seat),
    holder uuid,
    term bigint NOT NULL,
    expires_at timestamptz NOT NULL
);
INSERT INTO windlass.leadership (holder, term, expires_at) VALUES (NULL, 0, '-infinity');

-- An ended task is never changed, and leaves its place only by retry, discard or retention,
-- which say so for their transaction.
CREATE FUNCTION windlass.refuse_change() RETURNS trigger
LANGUAGE plpgsql
AS $$
BEGIN
    IF TG_OP = 'DELETE' AND current_setting('windlass_internal.removing', true) = 'on' THEN
        RETURN OLD;
    END IF;
    RAISE EXCEPTION 'task % has ended as %: it cannot be changed', OLD.id, OLD.status
        USING ERRCODE = 'WL003', HINT = 'retry reopens an unsuccessful task';
END
$$;
CREATE TRIGGER history_is_final BEFORE UPDATE OR DELETE ON windlass.history
    FOR EACH ROW EXECUTE FUNCTION windlass.refuse_change();
CREATE TRIGGER dead_is_final BEFORE UPDATE OR DELETE ON windlass.dead
    FOR EACH ROW EXECUTE FUNCTION windlass.refuse_change();

CREATE FUNCTION windlass.refuse_older_generation() RETURNS trigger
LANGUAGE plpgsql
AS $$
BEGIN
    RAISE EXCEPTION 'task %: generation % cannot follow %', OLD.id, NEW.generation, OLD.generation
        USING ERRCODE = 'WL003';
END
$$;
CREATE TRIGGER generation_never_falls BEFORE UPDATE ON windlass.task
    FOR EACH ROW WHEN (NEW.generation < OLD.generation OR NEW.id <> OLD.id)
    EXECUTE FUNCTION windlass.refuse_older_generation();

-- One row per task, live or ended, for people and SQL. Not for our own listings.
CREATE VIEW windlass.tasks AS
SELECT
    t.id, t.type, t.queue, t.payload,
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
    h.id, h.type, h.queue, h.payload, h.status, h.priority, h.idempotency_key, h.worker_id,
    h.created_at, h.scheduled_for, h.claimed_at, h.started_at, h.completed_at, h.completed_at,
    h.attempts, h.max_attempts, h.last_error, h.result, h.tags, h.generation
FROM windlass.history h
UNION ALL
SELECT
    d.id, d.type, d.queue, d.payload, d.status, d.priority, d.idempotency_key, d.worker_id,
    d.created_at, d.scheduled_for, d.claimed_at, d.started_at, d.completed_at, d.completed_at,
    d.attempts, d.max_attempts, d.last_error, d.result, d.tags, d.generation
FROM windlass.dead d;

CREATE VIEW windlass.workers AS
SELECT
    w.id, w.host, w.pid, w.version, w.capacity, w.types, w.queues, w.started_at,
    p.heartbeat_at, p.running, p.idle,
    coalesce(l.holder = w.id AND l.expires_at > windlass.clock(), false) AS leader
FROM windlass.worker w
JOIN windlass.worker_pulse p ON p.worker_id = w.id
CROSS JOIN windlass.leadership l;
