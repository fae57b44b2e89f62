-- examine_due: scheduled tasks that nobody has made ready although they are due, and since when.
-- $1 for how many seconds at least
WITH moment AS MATERIALIZED (
    SELECT windlass.clock() AS now
)
SELECT
    count(*) AS tasks,
    coalesce(extract(epoch FROM max(m.now) - min(s.due))::float8, 0) AS overdue
FROM moment m
JOIN windlass.scheduled s ON s.due < m.now - $1::float8 * interval '1 second'
