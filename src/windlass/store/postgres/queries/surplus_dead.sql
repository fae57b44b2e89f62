-- surplus_dead: dead tasks that a queue has above a number, first ended first. $1 most, $2 limit
WITH full_queue AS MATERIALIZED (
    SELECT d.queue, count(*) - $1::bigint AS surplus
    FROM windlass.dead d
    GROUP BY d.queue
    HAVING count(*) > $1::bigint
)
SELECT s.id, s.queue
FROM full_queue f
CROSS JOIN LATERAL (
    SELECT d.id, d.queue, d.completed_at
    FROM windlass.dead d
    WHERE d.queue = f.queue
    ORDER BY d.completed_at, d.id
    LIMIT least(f.surplus, $2::bigint)
) s
ORDER BY s.completed_at, s.id
LIMIT $2::bigint
