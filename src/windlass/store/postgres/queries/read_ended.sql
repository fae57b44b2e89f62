-- read_ended: of these tasks, those that ended, and those that nobody knows (status NULL).
-- $1 task_ids
SELECT u.id, e.status::text AS status, e.result, e.last_error, e.error_class
FROM unnest($1::uuid[]) AS u (id)
LEFT JOIN LATERAL (
    SELECT h.status, h.result, h.last_error, NULL AS error_class FROM windlass.history h WHERE h.id = u.id
    UNION ALL
    SELECT d.status, d.result, d.last_error, d.errors -> -1 ->> 'class' FROM windlass.dead d WHERE d.id = u.id
) e ON true
WHERE e.status IS NOT NULL OR NOT EXISTS (SELECT FROM windlass.task t WHERE t.id = u.id)
