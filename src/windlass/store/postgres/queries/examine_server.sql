-- examine_server: what the server says of itself, and of the role that asks.
-- Limits are those with which a session begins: our own are set for one transaction.
SELECT
    current_setting('server_version') AS version,
    current_setting('server_version_num')::integer / 10000 AS major,
    current_database()::text AS database,
    current_setting('server_encoding') AS encoding,
    current_user::text AS role,
    session_user::text AS login,
    pg_backend_pid() AS session,
    pg_is_in_recovery() AS is_standby,
    current_setting('default_transaction_read_only')::boolean AS is_read_only,
    current_setting('default_transaction_isolation') AS isolation,
    current_setting('fsync')::boolean AS fsync,
    current_setting('full_page_writes')::boolean AS full_page_writes,
    current_setting('synchronous_commit') AS synchronous_commit,
    current_setting('synchronous_standby_names') AS synchronous_standby_names,
    current_setting('autovacuum')::boolean AND current_setting('track_counts')::boolean AS autovacuum,
    coalesce((SELECT reset_val::bigint FROM pg_settings WHERE name = 'statement_timeout'), 0)
        AS statement_timeout_ms,
    coalesce((SELECT reset_val::bigint FROM pg_settings WHERE name = 'transaction_timeout'), 0)
        AS transaction_timeout_ms,
    coalesce((SELECT reset_val::bigint FROM pg_settings WHERE name = 'idle_in_transaction_session_timeout'), 0)
        AS idle_timeout_ms,
    (SELECT coalesce(sum(d.numbackends), 0) FROM pg_stat_database d)::integer AS connections,
    current_setting('max_connections')::integer
        - current_setting('superuser_reserved_connections')::integer
        - coalesce(nullif(current_setting('reserved_connections', true), '')::integer, 0) AS max_connections,
    pg_has_role(current_user, 'pg_read_all_stats', 'USAGE') AS sees_others
