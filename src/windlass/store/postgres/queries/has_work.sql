-- has_work: whether a task of these types and queues is ready or claimed.
-- $1 types, $2 queues (NULL: all)
SELECT EXISTS (
    SELECT
    FROM (
        SELECT queue, type, lane FROM windlass.lane
        UNION ALL
        SELECT queue, type, lane FROM windlass.resting_lane
    ) l
    WHERE l.type = ANY ($1::text[]) AND ($2::text[] IS NULL OR l.queue = ANY ($2))
        AND NOT EXISTS (
            SELECT FROM windlass.queue q WHERE q.name = l.queue AND q.paused_at IS NOT NULL
        )
        AND EXISTS (SELECT FROM windlass.ready r WHERE r.lane = l.lane)
) OR EXISTS (
    SELECT
    FROM windlass.claim_task b
    CROSS JOIN LATERAL unnest(b.task_ids, b.generations) AS k (task_id, generation)
    JOIN windlass.task t ON t.id = k.task_id AND t.generation = k.generation
    WHERE t.type = ANY ($1::text[]) AND ($2::text[] IS NULL OR t.queue = ANY ($2))
)
