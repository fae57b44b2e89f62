-- retire_lanes: let claims pass by the lanes that were listed long ago and are empty now.
-- An enqueue under way may count on such a lane: relist_busy_lanes finds what it added.
-- $1 listed for at least so long
UPDATE windlass.lane l
SET retired_at = windlass.clock()
WHERE l.retired_at IS NULL AND l.listed_at <= windlass.clock() - $1::interval
    AND NOT EXISTS (SELECT FROM windlass.ready r WHERE r.lane = l.lane)
