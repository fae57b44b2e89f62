-- has_migrations: NULL if this schema was never migrated.
SELECT to_regclass('windlass.migration')::text
