-- drop_past_windows: forget windows that are over, and debounces whose task waits no longer. $1 at most so many
-- Whoever has one of them locked is about to open it again.
WITH past AS MATERIALIZED (
    SELECT d.type, d.key
    FROM windlass.dedupe d
    WHERE d.until <= (SELECT windlass.clock())
        AND (left(d.key, 1) <> 'd' OR NOT EXISTS (
            SELECT FROM windlass.scheduled s WHERE s.task_id = ANY (ARRAY[d.task_id]) AND s.generation = 1
        ))
    ORDER BY d.until
    LIMIT $1
    FOR UPDATE SKIP LOCKED
)
DELETE FROM windlass.dedupe d
USING past p
WHERE d.type = ANY (ARRAY[p.type]) AND d.key = ANY (ARRAY[p.key])
