-- explain_limits: every limit in force, and what it lets through. $1 now
SELECT
    r.scope, r.name, r.concurrency, r.rate, r.burst, l.room, coalesce(u.used, 0) AS used, l.tokens
FROM windlass.lane_rule_in_force r
CROSS JOIN LATERAL windlass.limit_room(r.scope, r.name, r.concurrency, r.rate, r.burst, $1) l
LEFT JOIN LATERAL (
    SELECT k.used
    FROM windlass.limit_use k
    WHERE k.scope = r.scope AND k.name = r.name
    ORDER BY k.version DESC
    LIMIT 1
) u ON r.concurrency IS NOT NULL
WHERE r.concurrency IS NOT NULL OR r.rate IS NOT NULL
ORDER BY r.scope, r.name COLLATE "C"
