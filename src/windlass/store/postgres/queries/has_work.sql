-- has_work: whether a task of these types and queues is ready or claimed, or about to be let through a gate.
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
        AND NOT EXISTS (SELECT FROM windlass.paused_type p WHERE p.type = l.type)
        AND EXISTS (SELECT FROM windlass.ready r WHERE r.lane = l.lane)
) OR EXISTS (
    SELECT
    FROM windlass.claim_task b
    CROSS JOIN LATERAL unnest(b.task_ids, b.generations) AS k (task_id, generation)
    JOIN windlass.task t ON t.id = k.task_id AND t.generation = k.generation
    WHERE t.type = ANY ($1::text[]) AND ($2::text[] IS NULL OR t.queue = ANY ($2))
) OR EXISTS (
    -- Somebody is to look whether a gate lets tasks through, now or when it has tokens for more. Who is the first of
    -- an ordering key may have to wait for its time there.
    SELECT
    FROM windlass.gate_entry e
    JOIN windlass.task t ON t.id = e.task_id
    WHERE NOT e.is_open AND e.gate IN (SELECT c.gate FROM windlass.gate_call c)
        AND t.type = ANY ($1::text[]) AND ($2::text[] IS NULL OR t.queue = ANY ($2))
        AND NOT EXISTS (
            SELECT FROM windlass.queue q WHERE q.name = t.queue AND q.paused_at IS NOT NULL
        )
        AND NOT EXISTS (SELECT FROM windlass.paused_type p WHERE p.type = t.type)
        AND (e.gate & 1 = 1 OR t.scheduled_for <= (SELECT windlass.clock()))
)
