-- drop_double_lanes: keep one row of each lane, a listed one if there is one.
DELETE FROM windlass.lane l
USING windlass.lane kept
WHERE kept.lane = l.lane AND kept.ctid <> l.ctid
    AND (kept.retired_at IS NOT NULL, kept.ctid) < (l.retired_at IS NOT NULL, l.ctid)
