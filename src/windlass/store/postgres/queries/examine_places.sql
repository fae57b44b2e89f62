-- examine_places: live tasks that are not in exactly one place, and places without a task. One snapshot.
-- What a claim holds of a generation that is over, or of a task that has ended, was settled: that is as it
-- should be. Returns for each kind of trouble how many there are, and some of the ids.
WITH held AS MATERIALIZED (
    SELECT k.task_id, k.generation, count(*) AS claims
    FROM windlass.claim c
    JOIN windlass.claim_task b ON b.token = c.token
    CROSS JOIN LATERAL unnest(b.task_ids, b.generations) AS k (task_id, generation)
    GROUP BY k.task_id, k.generation
), unlisted AS MATERIALIZED (
    SELECT lane FROM windlass.ready
    EXCEPT
    SELECT lane FROM windlass.lane
    EXCEPT
    SELECT lane FROM windlass.resting_lane
), seen AS (
    SELECT
        coalesce(t.id, r.task_id, s.task_id, e.task_id) AS id,
        t.id IS NULL AS is_gone,
        (r.task_id IS NOT NULL)::integer + (s.task_id IS NOT NULL)::integer
            + (e.task_id IS NOT NULL)::integer + coalesce(h.claims, 0) AS places,
        coalesce(r.generation, s.generation, t.generation) <> t.generation AS is_other
    FROM windlass.task t
    FULL JOIN windlass.ready r ON r.task_id = t.id
    FULL JOIN windlass.scheduled s ON s.task_id = t.id
    FULL JOIN (SELECT k.task_id FROM windlass.gate_entry k WHERE NOT k.is_open) e ON e.task_id = t.id
    LEFT JOIN held h ON h.task_id = t.id AND h.generation = t.generation
), trouble AS (
    SELECT
        CASE
            WHEN s.is_gone THEN 'no task'
            WHEN s.places = 0 THEN 'nowhere'
            WHEN s.places > 1 THEN 'several'
            ELSE 'generation'
        END AS kind,
        s.id
    FROM seen s
    WHERE s.is_gone OR s.places <> 1 OR s.is_other
    UNION ALL
    SELECT 'no lane', r.task_id
    FROM windlass.ready r
    JOIN unlisted u ON u.lane = r.lane
    UNION ALL
    SELECT 'not held', u.task_id
    FROM windlass.running u
    JOIN windlass.task t ON t.id = u.task_id AND t.generation = u.generation
    WHERE NOT EXISTS (SELECT FROM held h WHERE h.task_id = u.task_id AND h.generation = u.generation)
    UNION ALL
    SELECT 'gate', e.task_id
    FROM windlass.gate g
    FULL JOIN (
        SELECT k.gate, count(*) AS held, min(k.task_id::text)::uuid AS task_id
        FROM windlass.gate_entry k
        WHERE k.is_open
        GROUP BY k.gate
    ) e ON e.gate = g.gate
    WHERE coalesce(g.held, 0) <> coalesce(e.held, 0)
)
SELECT t.kind, count(*)::integer AS tasks, (array_agg(t.id::text))[1:3] AS some
FROM trouble t
GROUP BY t.kind
ORDER BY t.kind
