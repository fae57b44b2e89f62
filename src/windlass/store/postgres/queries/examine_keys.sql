-- examine_keys: idempotency keys whose task is gone. $1 only of these tasks (NULL: of all)
-- The keys of a partition that is being dropped outlive its tasks for a moment: then nothing is said.
SELECT i.task_id::text AS task_id, i.type
FROM windlass.idempotency i
WHERE ($1::uuid[] IS NULL OR i.task_id = ANY ($1))
    AND NOT EXISTS (SELECT FROM windlass.task t WHERE t.id = i.task_id)
    AND NOT EXISTS (SELECT FROM windlass.history h WHERE h.id = i.task_id)
    AND NOT EXISTS (SELECT FROM windlass.dead d WHERE d.id = i.task_id)
    AND NOT EXISTS (
        SELECT
        FROM pg_class c
        WHERE c.relnamespace = (SELECT h.relnamespace FROM pg_class h WHERE h.oid = 'windlass.history'::regclass)
            AND c.relkind = 'r' AND c.relname ~ '^history_[0-9]{8}_[0-9]{8}$'
            AND NOT EXISTS (
                SELECT FROM pg_inherits n WHERE n.inhrelid = c.oid AND NOT n.inhdetachpending
            )
    )
LIMIT 100
