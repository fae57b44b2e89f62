-- prune_slots: forget what became of slots, above so many for a schedule or out of time; returns how many.
-- $1 most, $2 so many of the last ones are kept anyway, $3 retention
WITH gone AS (
    DELETE FROM windlass.slot k
    USING windlass.schedule s
    CROSS JOIN LATERAL (
        SELECT
            (
                SELECT l.slot_at FROM windlass.slot l WHERE l.schedule = s.name
                ORDER BY l.slot_at DESC OFFSET $1 LIMIT 1
            ) AS surplus,
            (
                SELECT l.slot_at FROM windlass.slot l WHERE l.schedule = s.name
                ORDER BY l.slot_at DESC OFFSET $2 LIMIT 1
            ) AS old
    ) b
    WHERE k.schedule = s.name AND (
        k.slot_at <= b.surplus
        OR (k.slot_at <= b.old AND k.decided_at < windlass.clock() - $3::interval)
    )
    RETURNING true
)
SELECT count(*) FROM gone
