-- examine_rights: what the role may not do with the tables and functions of the schema.
-- A partition is read and written with the rights on its parent, but detached and dropped by its owner.
-- Functions that run with the rights of their owner are granted one by one: they are left out.
WITH home AS MATERIALIZED (
    SELECT n.oid FROM pg_namespace n WHERE n.nspname = 'SCHEMA_NAME'
), relation AS MATERIALIZED (
    SELECT c.oid, c.relname::text AS name, c.relispartition, c.relowner
    FROM pg_class c
    JOIN home h ON h.oid = c.relnamespace
    WHERE c.relkind IN ('r', 'p', 'v')
)
SELECT
    coalesce((SELECT has_schema_privilege(h.oid, 'USAGE') FROM home h), false) AS is_usable,
    ARRAY(
        SELECT r.name FROM relation r
        WHERE NOT r.relispartition AND NOT has_table_privilege(r.oid, 'SELECT')
        ORDER BY r.name
    ) AS unreadable,
    ARRAY(
        SELECT r.name FROM relation r
        WHERE r.name IN ('task', 'ready', 'scheduled', 'lane', 'idempotency', 'task_tag', 'large_payload', 'expiry')
            AND NOT has_table_privilege(r.oid, 'INSERT')
        ORDER BY r.name
    ) AS closed,
    ARRAY(
        SELECT r.name FROM relation r
        WHERE NOT pg_has_role(r.relowner, 'USAGE')
        ORDER BY r.name
    ) AS not_owned,
    ARRAY(
        SELECT DISTINCT p.proname::text AS name
        FROM pg_proc p
        JOIN home h ON h.oid = p.pronamespace
        WHERE NOT p.prosecdef AND NOT has_function_privilege(p.oid, 'EXECUTE')
        ORDER BY name
    ) AS not_callable,
    (SELECT count(*) FROM relation)::integer AS relations,
    (SELECT pg_get_userbyid(r.relowner)::text FROM relation r WHERE r.name = 'history') AS owner,
    coalesce((SELECT has_schema_privilege(h.oid, 'CREATE') FROM home h), false) AS may_create
