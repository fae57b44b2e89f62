-- explain_gate: the gate at which a task waits, and how many come before it there. Who is about to leave does not count.
-- $1 task_id, $2 now, $3 how many to count
SELECT
    k.type, k.name, r.slots, h.used, b.first::integer AS first, r.rate, r.tokens, e.gate
FROM windlass.gate_entry e
JOIN windlass.task_gate t ON t.task_id = e.task_id
CROSS JOIN LATERAL (
    SELECT
        CASE WHEN e.gate & 1 = 1 THEN t.limit_type END AS type,
        CASE WHEN e.gate & 1 = 1 THEN t.limit_value ELSE t.ordering_key END AS name
) k
LEFT JOIN windlass.gate g ON g.gate = e.gate
CROSS JOIN LATERAL (SELECT windlass.gate_used_by(e.gate) AS used OFFSET 0) h
CROSS JOIN LATERAL (
    SELECT count(*) AS first
    FROM (
        SELECT
        FROM windlass.gate_entry o
        WHERE o.gate = e.gate AND NOT o.is_open AND (o.x, o.n) < (e.x, e.n)
        ORDER BY o.x DESC, o.n DESC
        LIMIT $3
    ) o
) b
CROSS JOIN LATERAL windlass.gate_room(e.gate, k.type, k.name, coalesce(g.held, 0), g.tokens, g.counted_at, $2) r
WHERE e.task_id = $1 AND NOT e.is_open
