-- list_queues: queues with live tasks or a pause, with how many tasks are where.
WITH lanes AS (
    SELECT lane, queue FROM windlass.lane
    UNION
    SELECT lane, queue FROM windlass.resting_lane
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
        SELECT e.task_id, CASE
            -- What a gate lets through at once; see gate_status.
            WHEN row_number() OVER (PARTITION BY e.gate ORDER BY e.x, e.n) > g.room THEN 'blocked' ELSE 'pending'
        END AS status
        FROM windlass.gate_entry e
        JOIN (
            SELECT d.gate, least(1000, r.slots - windlass.gate_used_by(d.gate), floor(r.tokens + 1e-6)) AS room
            FROM (SELECT DISTINCT o.gate FROM windlass.gate_entry o WHERE NOT o.is_open) d
            CROSS JOIN LATERAL (
                SELECT w.limit_type, w.limit_value
                FROM windlass.gate_entry f
                JOIN windlass.task_gate w ON w.task_id = f.task_id
                WHERE f.gate = d.gate AND NOT f.is_open
                LIMIT 1
            ) k
            LEFT JOIN windlass.gate u ON u.gate = d.gate
            CROSS JOIN LATERAL windlass.gate_room(
                d.gate, k.limit_type, k.limit_value, coalesce(u.held, 0), u.tokens, u.counted_at, windlass.clock()) r
        ) g ON g.gate = e.gate
        WHERE NOT e.is_open
    ) p
    JOIN windlass.task t ON t.id = p.task_id
    CROSS JOIN LATERAL (
        SELECT CASE WHEN p.status = 'pending' THEN windlass.gate_status(t.id)::text ELSE p.status END AS status
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
