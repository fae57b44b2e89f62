-- assert_leader: hold the seat for this transaction, or raise. $1 holder, $2 term
SELECT windlass.assert_leader($1, $2)
