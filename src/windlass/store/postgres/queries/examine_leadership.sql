-- examine_leadership: who leads, and for how many seconds more; NULL if the seat was given up.
SELECT
    l.holder::text AS holder,
    l.term,
    CASE WHEN isfinite(l.expires_at)
        THEN extract(epoch FROM l.expires_at - windlass.clock())::float8 END AS expires_in
FROM windlass.leadership l
