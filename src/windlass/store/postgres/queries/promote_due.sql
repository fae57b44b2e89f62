-- promote_due: make due tasks ready; returns how many. $1 limit, $2 all_of_them
SELECT windlass.promote_due($1, $2)
