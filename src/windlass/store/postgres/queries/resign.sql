-- resign: free the seat if it is still held under this term. $1 holder, $2 term
UPDATE windlass.leadership
SET expires_at = '-infinity'
WHERE holder = $1 AND term = $2
