-- list_value_rules: the rules of limits by value that are in force. $1 type (NULL: all)
SELECT DISTINCT ON (v.type COLLATE "C", v.value IS NOT NULL, v.value COLLATE "C")
    v.by_operator, v.type, v.value, v.concurrency, v.rate, v.burst, v.weight
FROM windlass.value_rule v
WHERE $1::text IS NULL OR v.type = $1
ORDER BY v.type COLLATE "C", v.value IS NOT NULL, v.value COLLATE "C", v.by_operator DESC
