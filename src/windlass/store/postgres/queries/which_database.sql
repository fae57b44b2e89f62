-- which_database: what tells this database from any other, whatever way leads to it.
SELECT c.system_identifier, d.oid, d.datname AS name
FROM pg_control_system() c
CROSS JOIN pg_database d
WHERE d.datname = current_database()
