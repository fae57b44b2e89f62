-- promote_due: make due tasks ready; returns how many. $1 limit
SELECT windlass.promote_due($1)
