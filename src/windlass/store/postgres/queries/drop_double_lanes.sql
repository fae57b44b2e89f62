-- drop_double_lanes: keep one row of each lane.
DELETE FROM windlass.lane l
USING windlass.lane kept
WHERE kept.lane = l.lane AND kept.ctid < l.ctid
