-- order_workers: ask workers to pause, to resume or to drain, wake those that listen, and say which are known.
-- $1 worker_ids, $2 order. What was asked before keeps its time; who drains goes on to do so.
-- Locks the rows of workers in the order of their ids, and waits two seconds for whoever holds one.
WITH limited AS MATERIALIZED (
    SELECT set_config('lock_timeout', '2s', true)
), known AS MATERIALIZED (
    SELECT w.id
    FROM limited, windlass.worker w
    WHERE w.id = ANY ($1::uuid[])
    ORDER BY w.id
    FOR NO KEY UPDATE OF w
), ordered AS (
    UPDATE windlass.worker w
    SET paused_at = CASE $2::text
            WHEN 'pause' THEN coalesce(w.paused_at, windlass.clock())
            WHEN 'drain' THEN w.paused_at
        END,
        drained_at = CASE $2::text
            WHEN 'drain' THEN coalesce(w.drained_at, windlass.clock())
            ELSE w.drained_at
        END
    FROM known
    WHERE w.id = known.id
    RETURNING w.id
)
SELECT o.id, pg_notify('windlass.wake', 'order ' || o.id)
FROM ordered o
