-- mend_gates: see to what should not be at some of the gates; returns how many. $1 the first of them
SELECT windlass.mend_gates($1)
