-- list_queues: queues with live tasks or a pause, with how many tasks are where.
WITH lanes AS (
    SELECT lane, queue FROM windlass.lane
    UNION
    SELECT lane, queue FROM windlass.resting_lane
), leaving AS (
    SELECT c.gate, count(*)::integer AS leaving FROM windlass.gate_call c WHERE c.leaving IS NOT NULL GROUP BY c.gate
), waiting AS (
    SELECT l.queue, 'pending' AS status, count(*) AS tasks, min(r.ready_at) AS oldest
    FROM windlass.ready r
    JOIN lanes l ON l.lane = r.lane
    GROUP BY l.queue
    UNION ALL
    SELECT l.queue, 'scheduled', count(*), NULL
    FROM windlass.scheduled s
    JOIN lanes l ON l.lane = s.lane
    GROUP BY l.queue
    UNION ALL
    SELECT t.queue, CASE WHEN r.task_id IS NULL THEN 'claimed' ELSE 'running' END, count(*), NULL
    FROM windlass.claim_task b
    CROSS JOIN LATERAL unnest(b.task_ids, b.generations) AS k (task_id, generation)
    JOIN windlass.task t ON t.id = k.task_id AND t.generation = k.generation
    LEFT JOIN windlass.running r ON r.task_id = t.id AND r.generation = t.generation
    GROUP BY 1, 2
    UNION ALL
    SELECT t.queue, k.status, count(*), min(t.scheduled_for) FILTER (WHERE k.status = 'pending')
    FROM (
        SELECT
            e.task_id, e.gate,
            -- What a gate lets through at once; see gate_status. Where nobody has said how many, all.
            coalesce(row_number() OVER (PARTITION BY e.gate ORDER BY e.x, e.n) > g.room, false) AS is_blocked
        FROM windlass.gate_entry e
        JOIN (
            SELECT f.gate, r.slots - coalesce(u.held, 0) + coalesce(c.leaving, 0) AS room
            FROM (SELECT DISTINCT o.gate FROM windlass.gate_entry o WHERE NOT o.is_open AND o.gate & 1 = 0) f
            CROSS JOIN (VALUES (1)) AS r (slots)
            LEFT JOIN windlass.gate u ON u.gate = f.gate
            LEFT JOIN leaving c ON c.gate = f.gate
            UNION ALL
            SELECT f.gate, least(r.slots - coalesce(u.held, 0) + coalesce(c.leaving, 0), floor(r.tokens + 1e-6))
            FROM (
                SELECT DISTINCT ON (o.gate) o.gate, o.task_id
                FROM windlass.gate_entry o
                WHERE NOT o.is_open AND o.gate & 1 = 1
                ORDER BY o.gate
            ) f
            JOIN windlass.task_gate w ON w.task_id = f.task_id
            LEFT JOIN windlass.gate u ON u.gate = f.gate
            LEFT JOIN leaving c ON c.gate = f.gate
            CROSS JOIN LATERAL windlass.gate_room(
                f.gate, w.limit_type, w.limit_value, coalesce(u.held, 0), u.tokens, u.counted_at, windlass.clock()) r
        ) g ON g.gate = e.gate
        WHERE NOT e.is_open
    ) p
    JOIN windlass.task t ON t.id = p.task_id
    CROSS JOIN LATERAL (
        SELECT CASE
            WHEN p.is_blocked THEN 'blocked'
            -- The first one of an ordering key goes on to the gate of its value, or waits for its time.
            WHEN p.gate & 1 = 0 THEN windlass.gate_status(t.id)::text
            ELSE 'pending'
        END AS status
    ) k
    GROUP BY 1, 2
)
SELECT
    coalesce(w.queue, q.name) AS name,
    q.paused_at IS NOT NULL AS paused,
    w.status, w.tasks, w.oldest
FROM (
    SELECT k.queue, k.status, sum(k.tasks)::bigint AS tasks, min(k.oldest) AS oldest
    FROM waiting k
    GROUP BY k.queue, k.status
) w
FULL JOIN (SELECT name, paused_at FROM windlass.queue WHERE paused_at IS NOT NULL) q
    ON q.name = w.queue
ORDER BY 1
