-- examine_partitions: the tables of history, attached or left over, and whatever else is attached to it.
SELECT
    c.relname::text AS name,
    i.inhrelid IS NOT NULL AS is_attached,
    coalesce(i.inhdetachpending, false) AS is_pending,
    c.relname ~ '^history_[0-9]{8}_[0-9]{8}$' AS is_ours
FROM pg_class c
LEFT JOIN pg_inherits i ON i.inhrelid = c.oid AND i.inhparent = 'windlass.history'::regclass
WHERE i.inhrelid IS NOT NULL
    OR (
        c.relnamespace = (SELECT h.relnamespace FROM pg_class h WHERE h.oid = 'windlass.history'::regclass)
        AND c.relkind = 'r' AND c.relname ~ '^history_[0-9]{8}_[0-9]{8}$'
    )
ORDER BY c.relname
