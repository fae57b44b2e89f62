-- remove_dead_workers: remove workers silent for three leases; their claims expire by themselves.
-- $1 steady_for: so long nobody has set the clock. If it was set back before that, the last sign of
-- life of a worker that was lost then lies ahead, by more than $2 unnoticed_step.
-- Claims that by this clock cannot have been granted yet would last as long: they are over, and the
-- worker is removed once none of them is left.
-- One whose row somebody holds may be about to give a sign of life: it is left for the next sweep.
WITH silent AS MATERIALIZED (
    SELECT p.worker_id, l.lease
    FROM windlass.worker_pulse p
    JOIN windlass.worker w ON w.id = p.worker_id
    CROSS JOIN LATERAL (SELECT p.expires_at - p.heartbeat_at AS lease) l
    WHERE
        p.heartbeat_at + 3 * l.lease <= windlass.clock()
        OR (p.heartbeat_at > windlass.clock() + $2::interval AND l.lease <= $1::interval)
    FOR UPDATE OF p, w SKIP LOCKED
), ahead AS MATERIALIZED (
    SELECT c.token, s.worker_id, s.lease
    FROM silent s
    JOIN windlass.claim c ON c.worker_id = s.worker_id
    WHERE c.expires_at - s.lease > windlass.clock()
), held AS MATERIALIZED (
    SELECT c.token
    FROM ahead a
    JOIN windlass.claim c ON c.token = a.token
    WHERE c.expires_at - a.lease > windlass.clock()
    FOR UPDATE OF c SKIP LOCKED
), ended AS (
    UPDATE windlass.claim c
    SET expires_at = windlass.clock()
    FROM held h
    WHERE c.token = h.token
), removed AS MATERIALIZED (
    SELECT s.worker_id
    FROM silent s
    WHERE NOT EXISTS (SELECT FROM ahead a WHERE a.worker_id = s.worker_id)
), removed_pulses AS (
    DELETE FROM windlass.worker_pulse p
    USING removed r
    WHERE p.worker_id = r.worker_id
)
DELETE FROM windlass.worker w
USING removed r
WHERE w.id = r.worker_id
RETURNING w.id
