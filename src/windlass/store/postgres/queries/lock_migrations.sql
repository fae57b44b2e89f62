-- lock_migrations: one migrator at a time, until the transaction ends; no wait for a table
-- may be long, since every statement on it would queue behind.
SELECT
    set_config('lock_timeout', '0', true),
    pg_advisory_xact_lock(hashtextextended('windlass.migration', 0)),
    set_config('lock_timeout', '5s', true)
