-- A handler that ends its task itself was refused on a database whose catalogue had been analysed.

-- check_completion: as before. The server may look at the names of all relations before it knows which of them are
-- partitions of history: so they are compared as they are written, and none is read as a day that is none.
CREATE OR REPLACE FUNCTION windlass.check_completion(
    shown_token uuid, shown_task uuid, shown_generation integer, retention interval, key_retention interval
) RETURNS boolean
LANGUAGE plpgsql
AS $$
DECLARE
    day text;
BEGIN
    SELECT to_char(
        windlass.drop_day(
            windlass.clock(), t.retention_seconds, retention, t.idempotency_key, key_retention
        )::timestamp,
        'YYYYMMDD'
    )
    INTO day
    FROM windlass.task t
    WHERE t.id = shown_task AND t.generation = shown_generation
        AND EXISTS (SELECT FROM windlass.claim c WHERE c.token = shown_token);
    IF NOT FOUND THEN
        RAISE EXCEPTION 'task %: the lease is lost', shown_task USING ERRCODE = 'WL001';
    END IF;
    RETURN EXISTS (
        SELECT
        FROM pg_inherits i
        JOIN pg_class c ON c.oid = i.inhrelid
        WHERE i.inhparent = 'windlass.history'::regclass AND NOT i.inhdetachpending
            AND day COLLATE "C" >= split_part(c.relname, '_', 2)
            AND day COLLATE "C" < split_part(c.relname, '_', 3)
    );
END
$$;
