-- look_behind: the first row of each lane that lies behind its bound. Reads only.
-- $1 lanes, $2 bound_x, $3 bound_n
SELECT b.lane, r.x::text::bigint AS x, r.n
FROM unnest($1::bigint[], $2::bigint[], $3::bigint[]) AS b (lane, x, n)
CROSS JOIN LATERAL (
    SELECT k.x, k.n
    FROM windlass.ready k
    WHERE k.lane = b.lane AND (k.x, k.n) <= (b.x::text::xid8, b.n)
    ORDER BY k.x, k.n
    LIMIT 1
) r
