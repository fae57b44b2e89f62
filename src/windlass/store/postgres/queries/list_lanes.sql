-- list_lanes: the numbers of the lanes of a type and a queue, also of those that rest.
-- $1 type, $2 queue; NULL: any
SELECT l.lane
FROM windlass.lane l
WHERE ($1::text IS NULL OR l.type = $1) AND ($2::text IS NULL OR l.queue = $2)
UNION
SELECT l.lane
FROM windlass.resting_lane l
WHERE ($1::text IS NULL OR l.type = $1) AND ($2::text IS NULL OR l.queue = $2)
