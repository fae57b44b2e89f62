-- rescue_claims: give back the tasks of expired claims.
-- $1 limit, $2 dead_retention, $3 retention, $4 key_retention
SELECT claims, returned, lost_attempts, dead, cancelled, died
FROM windlass.rescue_claims($1, $2, $3, $4)
