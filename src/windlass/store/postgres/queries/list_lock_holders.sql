-- list_lock_holders: other sessions that hold a lock on something of our schema, oldest first.
SELECT l.pid, a.application_name
FROM pg_locks l
JOIN pg_class c ON c.oid = l.relation
JOIN pg_stat_activity a ON a.pid = l.pid
WHERE l.granted
    AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
    AND c.relnamespace = to_regnamespace('SCHEMA_NAME')
    AND l.pid <> pg_backend_pid()
GROUP BY l.pid, a.application_name
ORDER BY min(a.xact_start), l.pid
LIMIT 5
