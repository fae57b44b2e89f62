-- examine_sessions: transactions of this database that are open for long, oldest first.
-- $1 for how many seconds at least. Those of other roles are seen by members of pg_read_all_stats only.
SELECT
    a.pid,
    a.usename::text AS role,
    a.application_name AS program,
    coalesce(host(a.client_addr), 'local') AS client,
    a.state,
    extract(epoch FROM clock_timestamp() - a.xact_start)::float8 AS open_for,
    a.backend_xmin IS NOT NULL OR a.backend_xid IS NOT NULL AS holds_back,
    ARRAY(
        SELECT DISTINCT c.relname::text
        FROM pg_locks l
        JOIN pg_class c ON c.oid = l.relation
        WHERE l.pid = a.pid AND l.granted AND l.locktype = 'relation'
            AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
            AND c.relnamespace = to_regnamespace('SCHEMA_NAME') AND c.relkind IN ('r', 'p')
        ORDER BY 1
    ) AS locked
FROM pg_stat_activity a
WHERE a.datname = current_database()
    AND a.pid <> pg_backend_pid()
    AND a.backend_type = 'client backend'
    AND a.xact_start < clock_timestamp() - $1::float8 * interval '1 second'
ORDER BY a.xact_start
LIMIT 20
