-- record: from now on write every change of a task, a claim or the seat beside it, in its transaction.
-- Nothing of the product is changed but for triggers; `DROP SCHEMA windlass_history CASCADE` ends it.
CREATE SCHEMA windlass_history;

CREATE TABLE windlass_history.event (
    n bigint GENERATED ALWAYS AS IDENTITY,
    at timestamptz NOT NULL DEFAULT windlass.clock(),
    began timestamptz NOT NULL DEFAULT now(),
    x xid8 NOT NULL DEFAULT pg_current_xact_id(),
    place text NOT NULL,
    change text NOT NULL,
    old_row jsonb,
    new_row jsonb,
    term bigint
);

-- The term whose seat this transaction holds: who locks a row, alone or with others, is its xmax.
CREATE FUNCTION windlass_history.held_term() RETURNS bigint
    LANGUAGE plpgsql
    AS $$
DECLARE
    own constant xid := pg_current_xact_id()::xid;
    seat record;
BEGIN
    SELECT l.term, l.xmax AS locker INTO seat FROM windlass.leadership l;
    IF seat.locker = own THEN
        RETURN seat.term;
    END IF;
    IF EXISTS (SELECT FROM pg_get_multixact_members(seat.locker) m WHERE m.xid = own) THEN
        RETURN seat.term;
    END IF;
    RETURN NULL;
EXCEPTION WHEN OTHERS THEN
    RETURN NULL;  -- it is the number of one transaction, not of ours, and not of several
END
$$;

CREATE FUNCTION windlass_history.note() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
DECLARE
    place constant text := TG_ARGV[0];
    left_out constant text[] := '{payload,result,errors,error,last_error}';
    old_row jsonb;
    new_row jsonb;
    is_rescue boolean;
BEGIN
    IF TG_OP <> 'INSERT' THEN
        old_row := to_jsonb(OLD) - left_out;
    END IF;
    IF TG_OP <> 'DELETE' THEN
        new_row := to_jsonb(NEW) - left_out;
    END IF;
    -- What a leader does to a task shows no token: it comes back, or ends, without its worker.
    is_rescue := CASE
        WHEN place = 'task' AND TG_OP = 'UPDATE' THEN
            new_row -> 'generation' <> old_row -> 'generation' AND new_row ->> 'returned_by' IS NULL
        WHEN place IN ('history', 'dead') AND TG_OP = 'INSERT' THEN
            new_row ->> 'worker_id' IS NOT NULL AND new_row ->> 'token' IS NULL
        ELSE false
    END;
    INSERT INTO windlass_history.event (place, change, old_row, new_row, term)
    VALUES (
        place, lower(TG_OP), old_row, new_row,
        CASE WHEN is_rescue THEN windlass_history.held_term() END
    );
    RETURN NULL;
END
$$;

CREATE TRIGGER noted AFTER INSERT OR UPDATE OR DELETE ON windlass.task
    FOR EACH ROW EXECUTE FUNCTION windlass_history.note('task');
CREATE TRIGGER noted AFTER INSERT OR DELETE ON windlass.ready
    FOR EACH ROW EXECUTE FUNCTION windlass_history.note('ready');
CREATE TRIGGER noted AFTER INSERT OR DELETE ON windlass.scheduled
    FOR EACH ROW EXECUTE FUNCTION windlass_history.note('scheduled');
CREATE TRIGGER noted AFTER INSERT OR DELETE ON windlass.claim
    FOR EACH ROW EXECUTE FUNCTION windlass_history.note('claim');
CREATE TRIGGER extension_noted AFTER UPDATE ON windlass.claim
    FOR EACH ROW WHEN (OLD.expires_at IS DISTINCT FROM NEW.expires_at)
    EXECUTE FUNCTION windlass_history.note('claim');
CREATE TRIGGER noted AFTER INSERT ON windlass.claim_task
    FOR EACH ROW EXECUTE FUNCTION windlass_history.note('claim_task');
CREATE TRIGGER noted AFTER DELETE ON windlass.running
    FOR EACH ROW EXECUTE FUNCTION windlass_history.note('running');
CREATE TRIGGER noted AFTER INSERT ON windlass.attempt
    FOR EACH ROW EXECUTE FUNCTION windlass_history.note('attempt');
CREATE TRIGGER noted AFTER INSERT OR DELETE ON windlass.history
    FOR EACH ROW EXECUTE FUNCTION windlass_history.note('history');
CREATE TRIGGER noted AFTER INSERT OR DELETE ON windlass.dead
    FOR EACH ROW EXECUTE FUNCTION windlass_history.note('dead');
CREATE TRIGGER noted AFTER UPDATE ON windlass.leadership
    FOR EACH ROW EXECUTE FUNCTION windlass_history.note('leadership');
CREATE TRIGGER noted AFTER INSERT OR DELETE ON windlass.worker
    FOR EACH ROW EXECUTE FUNCTION windlass_history.note('worker');
CREATE TRIGGER noted AFTER UPDATE ON windlass.worker_pulse
    FOR EACH ROW WHEN (OLD.heartbeat_at IS DISTINCT FROM NEW.heartbeat_at)
    EXECUTE FUNCTION windlass_history.note('worker_pulse');
