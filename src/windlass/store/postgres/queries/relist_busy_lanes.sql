-- relist_busy_lanes: list resting lanes that hold tasks again; returns how many.
SELECT windlass.relist_busy_lanes()
