-- list_rules: the rules that are in force, and how much of each limit of concurrency is used.
SELECT
    r.by_operator, coalesce(u.used, 0) AS used,
    r.scope, r.name, r.concurrency, r.rate, r.burst, r.ageing, r.weight
FROM windlass.lane_rule_in_force r
LEFT JOIN LATERAL (
    SELECT k.used
    FROM windlass.limit_use k
    WHERE k.scope = r.scope AND k.name = r.name
    ORDER BY k.version DESC
    LIMIT 1
) u ON r.concurrency IS NOT NULL
ORDER BY r.scope, r.name COLLATE "C"
