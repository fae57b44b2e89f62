-- explain_lanes: the lanes that a claim of all types reads, most urgent first, with how many tasks of each it
-- might take: those that have a limit, or those of suspects. Where there are very many lanes, fewer are counted.
-- $1 ageing, $2 alone, $3 queues with a limit, $4 what each lets through, $5 types with a limit, $6 what each
-- lets through, $7 how many to count
WITH head AS MATERIALIZED (
    SELECT h.lane, h.queue, h.type, least(q.room, t.room) AS room, h.place
    FROM windlass.ruled_heads(
        ARRAY(SELECT DISTINCT l.type FROM windlass.lane l), NULL, $1::interval, '{}', '{}', '{}', '{}', NULL
    ) WITH ORDINALITY AS h (lane, type, queue, priority, kind, x, n, ready_at, limits, place)
    LEFT JOIN unnest($3::text[], $4::integer[]) AS q (name, room) ON q.name = h.queue
    LEFT JOIN unnest($5::text[], $6::integer[]) AS t (name, room) ON t.name = h.type
    WHERE h.ready_at IS NOT NULL AND (h.kind = 2) = $2::boolean
        AND ($2 OR q.room IS NOT NULL OR t.room IS NOT NULL)
), size AS MATERIALIZED (
    SELECT least($7::bigint, greatest(50, 20 * $7::bigint / greatest(count(*), 1))) AS counted
    FROM head
)
SELECT
    h.lane, h.queue, h.type, least(w.tasks, s.counted) AS tasks, w.tasks > s.counted AS or_more,
    CASE WHEN $2 THEN (
        SELECT t.recoveries
        FROM windlass.ready r
        JOIN windlass.task t ON t.id = ANY (ARRAY[r.task_id])
        WHERE r.lane = h.lane
        ORDER BY r.x, r.n
        LIMIT 1
    ) END AS recoveries
FROM head h
CROSS JOIN size s
CROSS JOIN LATERAL (
    SELECT count(*) AS tasks
    FROM (
        SELECT
        FROM windlass.ready r
        WHERE r.lane = h.lane
        ORDER BY r.x, r.n
        LIMIT least(s.counted + 1, CASE WHEN $2 THEN NULL ELSE h.room END)
    ) k
) w
ORDER BY h.place
