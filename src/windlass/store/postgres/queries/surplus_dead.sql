-- surplus_dead: dead tasks that these queues have above a number, first ended first. $1 queues, $2 most, $3 limit
-- Reads what a queue is to keep, from the last one that ended, and then the first ones: not all there are.
WITH surplus AS MATERIALIZED (
    SELECT q.queue, d.completed_at, d.id
    FROM unnest($1::text[]) AS q (queue)
    CROSS JOIN LATERAL (
        SELECT k.completed_at, k.id
        FROM windlass.dead k
        WHERE k.queue = q.queue
        ORDER BY k.completed_at DESC, k.id DESC
        OFFSET $2::bigint
        LIMIT 1
    ) d
)
SELECT d.id, d.queue
FROM surplus s
CROSS JOIN LATERAL (
    SELECT k.id, k.queue, k.completed_at
    FROM windlass.dead k
    WHERE k.queue = s.queue AND (k.completed_at, k.id) <= (s.completed_at, s.id)
    ORDER BY k.completed_at, k.id
    LIMIT $3::bigint
) d
ORDER BY d.completed_at, d.id
LIMIT $3::bigint
