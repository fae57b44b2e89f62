-- examine_schema: whether the schema may be used and was ever migrated; no row if there is none.
SELECT
    pg_get_userbyid(n.nspowner)::text AS owner,
    has_schema_privilege(n.oid, 'USAGE') AS is_usable,
    EXISTS (SELECT FROM pg_class c WHERE c.relnamespace = n.oid AND c.relname = 'migration') AS is_begun
FROM pg_namespace n
WHERE n.nspname = 'SCHEMA_NAME'
