-- relist_busy_lanes: list the retired lanes again that hold tasks; returns how many.
SELECT windlass.relist_lanes(ARRAY(
    SELECT l.lane
    FROM windlass.lane l
    WHERE l.retired_at IS NOT NULL
        AND EXISTS (SELECT FROM windlass.ready r WHERE r.lane = l.lane)
))
