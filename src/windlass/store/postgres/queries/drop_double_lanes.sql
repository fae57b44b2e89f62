-- drop_double_lanes: keep one row of each lane. Skips what somebody holds.
WITH double AS MATERIALIZED (
    SELECT l.ctid AS place
    FROM windlass.lane l
    WHERE EXISTS (SELECT FROM windlass.lane kept WHERE kept.lane = l.lane AND kept.ctid < l.ctid)
    FOR UPDATE OF l SKIP LOCKED
)
DELETE FROM windlass.lane l USING double d WHERE l.ctid = d.place
