-- explain_gates: the gate at which a task waits, and that of its value if it has to pass its ordering key or to wait for
-- its time before (`is_next`): there it would be the last. With how many come before it; who is about to leave does not
-- count. $1 task_id, $2 now, $3 how many to count
SELECT
    k.is_next, k.type, k.name, r.slots, h.used, b.first::integer AS first, r.rate, r.tokens, k.gate
FROM (
    SELECT
        false AS is_next, e.gate, e.x, e.n,
        CASE WHEN e.gate & 1 = 1 THEN t.limit_type END AS type,
        CASE WHEN e.gate & 1 = 1 THEN t.limit_value ELSE t.ordering_key END AS name
    FROM windlass.gate_entry e
    JOIN windlass.task_gate t ON t.task_id = e.task_id
    WHERE e.task_id = $1 AND NOT e.is_open
    UNION ALL
    SELECT
        true, t.limit_gate, '18446744073709551615', 9223372036854775807, t.limit_type, t.limit_value
    FROM windlass.task_gate t
    WHERE t.task_id = $1 AND t.limit_gate IS NOT NULL AND (
        EXISTS (SELECT FROM windlass.scheduled s WHERE s.task_id = t.task_id)
        OR EXISTS (
            SELECT FROM windlass.gate_entry e WHERE e.task_id = t.task_id AND e.gate & 1 = 0 AND NOT e.is_open
        )
    )
) k
LEFT JOIN windlass.gate g ON g.gate = k.gate
CROSS JOIN LATERAL (SELECT windlass.gate_used_by(k.gate) AS used OFFSET 0) h
CROSS JOIN LATERAL (
    SELECT count(*) AS first
    FROM (
        SELECT
        FROM windlass.gate_entry o
        WHERE o.gate = k.gate AND NOT o.is_open AND (o.x, o.n) < (k.x, k.n)
        ORDER BY o.x DESC, o.n DESC
        LIMIT $3
    ) o
) b
CROSS JOIN LATERAL windlass.gate_room(k.gate, k.type, k.name, coalesce(g.held, 0), g.tokens, g.counted_at, $2) r
ORDER BY k.is_next
