-- next_schedule: in how many seconds a schedule wants a decision, if one does; but for some. $1 their names
SELECT (
    -- Before PostgreSQL 17 no difference may be infinite.
    extract(epoch FROM min(CASE WHEN s.decided_until > windlass.clock() THEN '-infinity' ELSE s.look_at END))
    - extract(epoch FROM windlass.clock())
)::float8
FROM windlass.schedule s
WHERE s.is_active AND s.name <> ALL ($1::text[])
