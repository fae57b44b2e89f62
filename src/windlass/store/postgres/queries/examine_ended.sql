-- examine_ended: live tasks that have ended as well. One snapshot. Ids grow with time, so that nothing that
-- ended before the oldest live task was made is read.
WITH oldest AS MATERIALIZED (
    SELECT t.id FROM windlass.task t ORDER BY t.id LIMIT 1
), ended AS (
    SELECT h.id FROM windlass.history h WHERE h.id >= (SELECT o.id FROM oldest o)
    UNION ALL
    SELECT d.id FROM windlass.dead d WHERE d.id >= (SELECT o.id FROM oldest o)
)
SELECT 'ended' AS kind, count(*)::integer AS tasks, (array_agg(t.id::text))[1:3] AS some
FROM windlass.task t
JOIN ended e ON e.id = t.id
HAVING count(*) > 0
