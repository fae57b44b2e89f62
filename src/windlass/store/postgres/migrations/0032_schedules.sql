-- Schedules, and what became of their slots. One that is retired keeps its row for a while: should it come back,
-- its pause is as it was, and no slot is fired again.
CREATE TABLE windlass.schedule (
    name text PRIMARY KEY,
    owner text NOT NULL,  -- the application whose last start decided what it is
    cron text,
    every interval,
    timezone text NOT NULL,
    task jsonb NOT NULL,  -- what is enqueued, as windlass.enqueue_many reads it
    overlap text NOT NULL CHECK (overlap IN ('skip', 'queue', 'allow')),
    catch_up integer NOT NULL CHECK (catch_up >= 0),
    jitter interval NOT NULL,
    revision bigint NOT NULL DEFAULT 1,  -- grows with every change: a decision on an older one is void
    registered_at timestamptz NOT NULL,
    decided_until timestamptz NOT NULL,  -- of slots up to here it is known what became of them
    -- Stretches of time, a begin and an end in turn, of which no slot is decided on again: a clock that is set back
    -- comes by once more, and rows of slots are not kept for ever.
    settled timestamptz[] NOT NULL DEFAULT '{}',
    look_at timestamptz NOT NULL,  -- when the next decision is due
    paused_at timestamptz,
    resumed_at timestamptz CHECK (resumed_at IS NULL OR paused_at IS NOT NULL),  -- until the next decision
    retired_at timestamptz,
    is_active boolean NOT NULL GENERATED ALWAYS AS (
        retired_at IS NULL AND (paused_at IS NULL OR resumed_at IS NOT NULL)
    ) STORED,
    CHECK ((cron IS NULL) <> (every IS NULL))
);

CREATE TABLE windlass.slot (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    schedule text NOT NULL REFERENCES windlass.schedule ON DELETE CASCADE,
    slot_at timestamptz NOT NULL,
    on_request boolean NOT NULL DEFAULT false,
    state text NOT NULL CHECK (state IN ('fired', 'skipped', 'waiting')),
    decided_at timestamptz NOT NULL,
    task_id uuid CHECK ((task_id IS NULL) = (state <> 'fired')),
    reason text,
    first_at timestamptz,  -- of several slots in a row that were skipped for one reason
    slots bigint NOT NULL DEFAULT 1
);

-- Whoever fires a slot writes its row in the same transaction: so it is fired once, whoever leads.
CREATE UNIQUE INDEX slot_once ON windlass.slot (schedule, slot_at) WHERE NOT on_request;
CREATE INDEX slot_order ON windlass.slot (schedule, slot_at DESC);
CREATE INDEX slot_waiting ON windlass.slot (schedule) WHERE state = 'waiting';

-- Who may read tasks may read this. Only workers write it, and they own the tables.
DO $$
DECLARE
    granted record;
BEGIN
    FOR granted IN
        SELECT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE a.grantee::regrole::text END AS role
        FROM pg_class c
        CROSS JOIN aclexplode(c.relacl) a
        WHERE c.oid = 'windlass.task'::regclass AND a.grantee <> c.relowner AND a.privilege_type = 'SELECT'
    LOOP
        EXECUTE format('GRANT SELECT ON windlass.schedule, windlass.slot TO %s', granted.role);
    END LOOP;
END
$$;
