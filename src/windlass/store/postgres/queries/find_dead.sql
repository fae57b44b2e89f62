-- find_dead: dead tasks, last ended first, out of the next 10000; the last of those is returned
-- (`is_last`) whether it fits or not. What is cheap to know is asked for first.
-- $1 statuses, $2 queue, $3 type, $4 error_class, $5 error, $6 unreplayed, $7 depth_below,
-- $8 before, $9 before_id, $10 ended_from, $11 limit
SELECT t.id, t.completed_at, t.fits, t.is_last
FROM (
    SELECT
        k.id, k.completed_at,
        ($1::text[] IS NULL OR k.status::text = ANY ($1))
            AND ($2::text IS NULL OR k.queue = $2)
            AND ($3::text IS NULL OR k.type = $3)
            -- Not EXISTS: for that, all replays might be read.
            AND (NOT $6::boolean OR (
                SELECT r.ancestor
                FROM windlass.replay r
                WHERE r.ancestor = k.id AND r.generation = k.generation
                LIMIT 1
            ) IS NULL)
            AND ($7::integer IS NULL OR coalesce(
                (SELECT r.depth FROM windlass.replay r WHERE r.task_id = k.id), 0
            ) < $7)
            AND ($4::text IS NULL OR coalesce(k.errors -> -1 ->> 'class', 'unknown') = $4)
            AND ($5::text IS NULL OR coalesce(
                (k.errors -> -1 ->> 'type') || ': ' || (k.errors -> -1 ->> 'message'), k.last_error, ''
            ) ~ $5)
            AS fits,
        row_number() OVER (ORDER BY k.completed_at DESC, k.id DESC) = 10000 AS is_last
    FROM (
        SELECT e.id, e.completed_at, e.status, e.queue, e.type, e.generation, e.errors, e.last_error
        FROM windlass.dead e
        WHERE (e.completed_at, e.id) < ($8::timestamptz, $9::uuid) AND e.completed_at >= $10
        ORDER BY e.completed_at DESC, e.id DESC
        LIMIT 10000
    ) k
) t
WHERE t.fits OR t.is_last
ORDER BY t.completed_at DESC, t.id DESC
LIMIT $11
