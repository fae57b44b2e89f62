-- pulse: keep the claims that have not expired, and note a sign of life, in one commit.
-- $1 worker_id, $2 tokens, $3 lease, $4 running, $5 idle, $6 patience (NULL: none),
-- $7 trusted: by the worker's own clock none of them has, so if by ours one did, ours was set ahead.
-- $8 breakers: the state of each, as JSON (NULL: it has none).
-- $9 drains: it claims nothing any more, and is seen as one that was told to drain.
-- $10 full_queues: of which it takes nothing for now (NULL: it has room in all).
-- Without patience it waits for nothing: a row that somebody holds must not cost the worker all its
-- claims. Those that were skipped are asked for one by one, with patience, and waited for first.
-- A worker's row that somebody holds is passed over as well: the next pulse says the same.
-- What people ask of the worker, and what queues weigh, is read and not locked.
-- One statement, so that a worker that vanishes meanwhile leaves no lock behind.
WITH limited AS MATERIALIZED (
    SELECT set_config('lock_timeout', (extract(epoch FROM $6::interval) * 1000)::bigint::text, true)
    WHERE $6::interval IS NOT NULL
), waited AS MATERIALIZED (
    SELECT c.token
    FROM limited, windlass.claim c
    WHERE c.token = ANY ($2::uuid[])
    ORDER BY c.token
    FOR NO KEY UPDATE OF c
), asked AS MATERIALIZED (
    SELECT c.token
    FROM windlass.claim c
    WHERE
        $6::interval IS NULL
        AND c.token = ANY ($2::uuid[]) AND (c.expires_at > windlass.clock() OR $7::boolean)
), held AS MATERIALIZED (
    SELECT c.token
    FROM windlass.claim c
    WHERE
        (SELECT count(*) FROM waited) IS NOT NULL
        AND c.token = ANY ($2::uuid[]) AND (c.expires_at > windlass.clock() OR $7::boolean)
    FOR NO KEY UPDATE SKIP LOCKED
), kept AS (
    UPDATE windlass.claim c
    SET expires_at = windlass.clock() + $3::interval
    FROM held
    WHERE c.token = held.token
    RETURNING c.token
), known AS MATERIALIZED (
    SELECT p.worker_id FROM windlass.worker_pulse p WHERE p.worker_id = $1 FOR NO KEY UPDATE SKIP LOCKED
), sign AS (
    UPDATE windlass.worker_pulse p
    SET heartbeat_at = windlass.clock(),
        expires_at = windlass.clock() + $3::interval,
        running = $4,
        idle = $5,
        breakers = $8::text::jsonb,
        full_queues = $10
    FROM known
    WHERE p.worker_id = known.worker_id
), draining AS MATERIALIZED (
    SELECT w.id
    FROM windlass.worker w
    -- Whoever waits for a claim holds nothing else meanwhile.
    WHERE $9::boolean AND $6::interval IS NULL AND w.id = $1 AND w.drained_at IS NULL
    FOR NO KEY UPDATE SKIP LOCKED
), drained AS (
    UPDATE windlass.worker w
    SET drained_at = windlass.clock()
    FROM draining
    WHERE w.id = draining.id
)
SELECT
    (SELECT coalesce(array_agg(k.token), '{}') FROM kept k) AS kept,
    (
        SELECT coalesce(array_agg(a.token), '{}') FROM asked a
        WHERE a.token NOT IN (SELECT h.token FROM held h)
    ) AS skipped,
    EXISTS (SELECT FROM windlass.worker_pulse p WHERE p.worker_id = $1) AS registered,
    (
        SELECT CASE WHEN w.drained_at IS NOT NULL THEN 'drain' WHEN w.paused_at IS NOT NULL THEN 'pause' END
        FROM windlass.worker w
        WHERE w.id = $1
    ) AS ordered,
    weight.queues AS weighed,
    weight.numbers AS weights
FROM (
    SELECT coalesce(array_agg(r.name), '{}') AS queues, coalesce(array_agg(r.weight), '{}') AS numbers
    FROM windlass.lane_rule_in_force r
    WHERE r.scope = 'queue' AND r.weight IS NOT NULL
) weight
