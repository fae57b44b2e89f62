-- read_isolation: how isolated a transaction is that asks for nothing, and whose setting that is.
SELECT
    current_setting('default_transaction_isolation') AS level,
    current_user::text AS role,
    current_database()::text AS database
