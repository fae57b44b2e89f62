-- examine_tables: how many rows of each table are dead, as the server counts them, and its last vacuum.
SELECT
    s.relname::text AS name,
    s.n_live_tup AS live,
    s.n_dead_tup AS dead,
    extract(epoch FROM clock_timestamp() - greatest(s.last_vacuum, s.last_autovacuum))::float8 AS vacuumed_ago,
    coalesce(
        (
            SELECT o.option_value::boolean
            FROM pg_options_to_table(c.reloptions) o
            WHERE o.option_name = 'autovacuum_enabled'
        ),
        true
    ) AS autovacuum
FROM pg_stat_user_tables s
JOIN pg_class c ON c.oid = s.relid
WHERE s.schemaname = 'SCHEMA_NAME' AND c.relkind = 'r' AND NOT c.relispartition
ORDER BY s.relname
