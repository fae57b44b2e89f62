-- list_partitions: the tables of history: attached, being detached, or left over.
SELECT c.relname AS name, i.inhrelid IS NOT NULL AS attached, coalesce(i.inhdetachpending, false) AS pending
FROM pg_class c
LEFT JOIN pg_inherits i
    ON i.inhrelid = c.oid AND i.inhparent = 'windlass.history'::regclass
WHERE c.relnamespace = (SELECT relnamespace FROM pg_class WHERE oid = 'windlass.history'::regclass)
    AND c.relkind = 'r' AND c.relname ~ '^history_[0-9]{8}_[0-9]{8}$'
ORDER BY c.relname
