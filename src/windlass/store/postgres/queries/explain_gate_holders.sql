-- explain_gate_holders: some tasks that a gate has let through, the first ones, and where they are.
-- $1 gate, $2 how many
SELECT
    k.task_id,
    CASE
        WHEN d.id IS NOT NULL THEN d.status::text  -- it keeps its ordering key
        WHEN r.task_id IS NOT NULL THEN 'pending'
        WHEN s.task_id IS NOT NULL THEN 'scheduled'
        WHEN u.task_id IS NOT NULL THEN 'running'
        ELSE 'claimed'
    END AS status,
    h.worker_id, s.due AS until
FROM (
    SELECT e.task_id, e.x, e.n
    FROM windlass.gate_entry e
    WHERE e.gate = $1 AND e.is_open AND NOT EXISTS (
        SELECT FROM windlass.gate_call c WHERE c.leaving = ANY (ARRAY[e.task_id]) AND c.gate = e.gate
    )
    ORDER BY e.x, e.n
    -- No more are open, and they come first: those that wait are not walked over.
    LIMIT least($2, windlass.gate_used_by($1))
) k
LEFT JOIN windlass.task t ON t.id = ANY (ARRAY[k.task_id])
LEFT JOIN windlass.dead d ON d.id = ANY (ARRAY[k.task_id])
LEFT JOIN windlass.ready r ON r.task_id = ANY (ARRAY[k.task_id])
LEFT JOIN windlass.scheduled s ON s.task_id = ANY (ARRAY[k.task_id])
LEFT JOIN windlass.running u ON u.task_id = ANY (ARRAY[k.task_id]) AND u.generation = t.generation
LEFT JOIN LATERAL (
    SELECT c.worker_id
    FROM windlass.claim_task b
    JOIN windlass.claim c ON c.token = b.token
    CROSS JOIN LATERAL unnest(b.task_ids, b.generations) AS n (task_id, generation)
    WHERE n.task_id = t.id AND n.generation = t.generation
    LIMIT 1
) h ON r.task_id IS NULL AND s.task_id IS NULL
ORDER BY k.x, k.n
