-- examine_missing: which of these tables, views, functions and procedures are not there.
-- $1 their kinds: TABLE, VIEW, FUNCTION or PROCEDURE; $2 their names
SELECT lower(n.kind) || ' ' || n.name AS missing
FROM unnest($1::text[], $2::text[]) AS n (kind, name)
WHERE CASE
    WHEN n.kind IN ('FUNCTION', 'PROCEDURE') THEN NOT EXISTS (
        SELECT
        FROM pg_proc p
        WHERE p.pronamespace = to_regnamespace('SCHEMA_NAME') AND p.proname = n.name
            AND (p.prokind = 'p') = (n.kind = 'PROCEDURE')
    )
    ELSE NOT EXISTS (
        SELECT
        FROM pg_class c
        WHERE c.relnamespace = to_regnamespace('SCHEMA_NAME') AND c.relname = n.name
            AND (c.relkind = 'v') = (n.kind = 'VIEW') AND c.relkind IN ('r', 'p', 'v')
    )
END
ORDER BY n.kind DESC, n.name
