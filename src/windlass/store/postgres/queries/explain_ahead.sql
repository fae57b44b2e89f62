-- explain_ahead: how many tasks of other lanes come before one that is ready, by their aged ready times; in a queue
-- that is strict, by their priorities first. Suspects are claimed by themselves. So many are looked at in each lane,
-- or fewer where there are many lanes: `or_more` says that one had more.
-- $1 lane, $2 queue, $3 type, $4 priority, $5 ready_at, $6 ageing, $7 types, $8 queues (NULL: all) that are read by
-- whoever reads this lane, $9 queues, $10 types of which nothing is taken, $11 how many to count
WITH rule AS MATERIALIZED (
    SELECT
        r.name, r.ageing = 'Infinity' AS is_strict,
        CASE WHEN r.ageing < 'Infinity' THEN r.ageing * interval '1 second' ELSE $6::interval END AS step
    FROM windlass.lane_rule_in_force r
    WHERE r.scope = 'queue' AND r.ageing IS NOT NULL
), own AS MATERIALIZED (
    SELECT
        $5::timestamptz - $4::integer * coalesce((SELECT r.step FROM rule r WHERE r.name = $2), $6::interval) AS rank,
        coalesce((SELECT r.is_strict FROM rule r WHERE r.name = $2), false) AS is_strict
), lane_of AS MATERIALIZED (
    SELECT DISTINCT
        l.lane,
        CASE
            WHEN NOT o.is_strict OR l.queue <> $2 THEN o.rank + l.priority * coalesce(r.step, $6::interval)
            WHEN l.priority = $4 THEN $5
            WHEN l.priority > $4 THEN 'infinity'
        END AS before
    FROM windlass.lane l
    CROSS JOIN own o
    LEFT JOIN rule r ON r.name = l.queue
    WHERE l.type = ANY ($7::text[]) AND ($8::text[] IS NULL OR l.queue = ANY ($8))
        AND l.kind < 2 AND l.lane <> $1
        AND l.queue <> ALL ($9::text[]) AND l.type <> ALL ($10::text[])
        AND NOT EXISTS (
            SELECT FROM windlass.queue q WHERE q.name = l.queue AND q.name <> $2 AND q.paused_at IS NOT NULL
        )
        AND NOT EXISTS (SELECT FROM windlass.paused_type p WHERE p.type = l.type AND p.type <> $3)
), size AS MATERIALIZED (
    SELECT least($11::bigint, greatest(50, 20 * $11::bigint / greatest(count(*), 1))) AS counted
    FROM lane_of
)
SELECT
    coalesce(sum(least(w.tasks, s.counted)), 0)::bigint AS tasks,
    coalesce(bool_or(w.tasks > s.counted), false) AS or_more
FROM lane_of l
CROSS JOIN size s
CROSS JOIN LATERAL (
    SELECT count(*) FILTER (WHERE k.ready_at < l.before) AS tasks
    FROM (
        SELECT r.ready_at
        FROM windlass.ready r
        WHERE r.lane = l.lane
        ORDER BY r.x, r.n
        LIMIT s.counted + 1
    ) k
) w
