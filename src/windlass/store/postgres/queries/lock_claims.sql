-- lock_claims: wait for claims that somebody holds, so that the pulse that follows keeps them.
-- $1 tokens
SELECT FROM windlass.claim c
WHERE c.token = ANY ($1::uuid[])
ORDER BY c.token
FOR NO KEY UPDATE
