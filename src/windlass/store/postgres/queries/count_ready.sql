-- count_ready: how many tasks of some lanes are ready; no more than a maximum are counted.
-- $1 lanes, $2 maximum
SELECT count(*)
FROM (
    SELECT
    FROM unnest($1::bigint[]) AS l (lane)
    CROSS JOIN LATERAL (
        SELECT
        FROM windlass.ready r
        WHERE r.lane = l.lane
        ORDER BY r.x DESC, r.n DESC
        LIMIT $2
    ) w
    LIMIT $2
) k
