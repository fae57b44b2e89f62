-- pulse: keep the claims that have not expired, and note a sign of life, in one commit.
-- $1 worker_id, $2 tokens, $3 lease, $4 running, $5 idle.
-- Locks claims in sorted order before the new expiry is computed.
WITH held AS MATERIALIZED (
    SELECT c.token
    FROM windlass.claim c
    WHERE c.token = ANY ($2::uuid[]) AND c.expires_at > windlass.clock()
    ORDER BY c.token
    FOR NO KEY UPDATE
), kept AS (
    UPDATE windlass.claim c
    SET expires_at = windlass.clock() + $3::interval
    FROM held
    WHERE c.token = held.token
    RETURNING c.token
), sign AS (
    UPDATE windlass.worker_pulse
    SET heartbeat_at = windlass.clock(),
        expires_at = windlass.clock() + $3::interval,
        running = $4,
        idle = $5
    WHERE worker_id = $1
    RETURNING worker_id
)
SELECT
    (SELECT coalesce(array_agg(k.token), '{}') FROM kept k) AS kept,
    EXISTS (SELECT FROM sign) AS registered
