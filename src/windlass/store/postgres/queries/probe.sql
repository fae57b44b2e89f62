-- probe: whether the connection still answers.
SELECT 1
