-- examine_prepared: transactions of this database that were prepared and neither committed nor rolled back.
SELECT
    p.gid,
    p.owner::text AS role,
    extract(epoch FROM clock_timestamp() - p.prepared)::float8 AS open_for
FROM pg_prepared_xacts p
WHERE p.database = current_database()
ORDER BY p.prepared
