-- list_migrations: the migrations that were applied.
SELECT number
FROM windlass.migration
ORDER BY number
