-- explain_suspects: how many tasks wait that run alone; no more than a maximum are counted. $1 maximum
SELECT count(*)
FROM (
    SELECT
    FROM windlass.ready r
    WHERE r.lane = ANY (ARRAY(SELECT l.lane FROM windlass.lane l WHERE l.kind = 2))
    LIMIT $1
) s
