-- retire_lanes: let old lanes that are empty rest; returns how many. $1 listed for so long
SELECT windlass.retire_lanes($1)
