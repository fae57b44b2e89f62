-- prune_slots: forget what became of slots, above so many for a schedule or out of time; returns how many.
-- $1 most, $2 so many of the last ones are kept anyway, $3 retention
WITH bound AS MATERIALIZED (
    -- A slot is decided on when its time has come: a later one cannot be out of time.
    SELECT s.name, n.before, greatest(l.surplus, CASE WHEN l.old IS NOT NULL THEN least(l.old, n.before) END) AS until,
        l.surplus
    FROM windlass.schedule s
    CROSS JOIN (SELECT windlass.clock() - $3::interval AS before OFFSET 0) n
    CROSS JOIN LATERAL (
        SELECT
            (
                SELECT k.slot_at FROM windlass.slot k WHERE k.schedule = s.name
                ORDER BY k.slot_at DESC OFFSET $1 LIMIT 1
            ) AS surplus,
            (
                SELECT k.slot_at FROM windlass.slot k WHERE k.schedule = s.name
                ORDER BY k.slot_at DESC OFFSET $2 LIMIT 1
            ) AS old
        OFFSET 0
    ) l
), gone AS (
    DELETE FROM windlass.slot k
    USING bound b
    WHERE k.schedule = b.name AND k.slot_at <= b.until
        AND (k.slot_at <= b.surplus OR k.decided_at < b.before)
    RETURNING true
)
SELECT count(*) FROM gone
