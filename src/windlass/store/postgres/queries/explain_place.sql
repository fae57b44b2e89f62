-- explain_place: how many tasks are before one in its lane; no more than a maximum are counted.
-- Counts backwards from there: what is gone and may not be cleaned up yet lies at the beginning of a lane.
-- $1 lane, $2 x, $3 n, $4 maximum
SELECT count(*)
FROM (
    SELECT
    FROM windlass.ready r
    WHERE r.lane = $1 AND (r.x, r.n) < ($2::text::xid8, $3::bigint)
    ORDER BY r.x DESC, r.n DESC
    LIMIT $4
) k
