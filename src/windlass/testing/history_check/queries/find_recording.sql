-- find_recording: whether there is something to record, and what is where the recording would be.
SELECT
    to_regclass('windlass.task') IS NOT NULL AS is_migrated,
    to_regnamespace('windlass_history') IS NOT NULL AS is_taken,
    to_regclass('windlass_history.event') IS NOT NULL
        AND to_regprocedure('windlass_history.note()') IS NOT NULL AS is_ours,
    (
        SELECT c.relnamespace::regnamespace::text
        FROM pg_trigger t
        JOIN pg_class c ON c.oid = t.tgrelid
        WHERE t.tgfoid = to_regprocedure('windlass_history.note()') AND c.relname = 'task'
        LIMIT 1
    ) AS recorded
