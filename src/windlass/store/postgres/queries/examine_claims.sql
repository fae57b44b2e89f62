-- examine_claims: claims that nobody has rescued one lease after their expiry, by worker, longest first.
-- $1 lease of workers that are gone, in seconds; $2 sweep, how often a leader looks, in seconds
WITH moment AS MATERIALIZED (
    SELECT windlass.clock() AS now
), overdue AS (
    SELECT c.worker_id, c.remaining, extract(epoch FROM m.now - c.expires_at)::float8 AS seconds
    FROM windlass.claim c
    CROSS JOIN moment m
    LEFT JOIN windlass.worker_pulse p ON p.worker_id = c.worker_id
    WHERE c.expires_at + coalesce(p.expires_at - p.heartbeat_at, $1::float8 * interval '1 second')
        + $2::float8 * interval '1 second' < m.now
)
SELECT
    o.worker_id::text AS worker_id, w.host, w.pid,
    count(*)::integer AS claims, sum(o.remaining)::integer AS tasks, max(o.seconds) AS overdue
FROM overdue o
LEFT JOIN windlass.worker w ON w.id = o.worker_id
GROUP BY o.worker_id, w.host, w.pid
ORDER BY max(o.seconds) DESC
