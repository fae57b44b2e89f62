-- resume_queue: grant tasks of a queue again, wake idle workers, and say whether it was paused.
-- $1 name
WITH patience AS MATERIALIZED (SELECT set_config('lock_timeout', '5s', true)), resumed AS (
    UPDATE windlass.queue q
    SET paused_at = NULL
    FROM patience
    WHERE q.name = $1 AND q.paused_at IS NOT NULL
    RETURNING q.name
)
SELECT EXISTS (SELECT FROM resumed), windlass.wake(false)
