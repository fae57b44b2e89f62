-- explain_task: what holds for one task that has not ended, in the words of a claim. $1 task_id
SELECT
    windlass.clock() AS now, t.recoveries, t.queue, t.priority,
    r.lane, r.x::text AS x, r.n, r.ready_at,
    r.lane IS NULL OR EXISTS (SELECT FROM windlass.lane l WHERE l.lane = r.lane) AS is_listed,
    q.paused_at AS queue_paused_at, p.paused_at AS type_paused_at, e.expires_at, s.put_off,
    c.reason AS cancel_reason, h.expires_at AS lease_until
FROM windlass.task t
LEFT JOIN windlass.ready r ON r.task_id = t.id
LEFT JOIN windlass.scheduled s ON s.task_id = t.id
LEFT JOIN windlass.queue q ON q.name = t.queue
LEFT JOIN windlass.paused_type p ON p.type = t.type
LEFT JOIN windlass.expiry e ON e.task_id = t.id
LEFT JOIN windlass.cancel_request c ON c.task_id = t.id
LEFT JOIN LATERAL (
    SELECT k.expires_at
    FROM windlass.claim_task b
    JOIN windlass.claim k ON k.token = b.token
    CROSS JOIN LATERAL unnest(b.task_ids, b.generations) AS u (task_id, generation)
    WHERE u.task_id = t.id AND u.generation = t.generation
    LIMIT 1
) h ON r.task_id IS NULL AND s.task_id IS NULL
WHERE t.id = $1
