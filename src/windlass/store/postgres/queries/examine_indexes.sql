-- examine_indexes: how large each index is, beside the rows that its table has.
SELECT
    c.relname::text AS name,
    pg_relation_size(c.oid) AS bytes,
    s.n_live_tup AS rows,
    x.indisvalid AS is_valid
FROM pg_stat_user_tables s
JOIN pg_index x ON x.indrelid = s.relid
JOIN pg_class c ON c.oid = x.indexrelid
WHERE s.schemaname = 'SCHEMA_NAME' AND c.relkind = 'i'
ORDER BY c.relname
