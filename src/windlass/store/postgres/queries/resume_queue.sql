-- resume_queue: grant tasks of a queue again, wake idle workers, and say whether it was paused.
-- $1 name
WITH resumed AS (
    UPDATE windlass.queue
    SET paused_at = NULL
    WHERE name = $1 AND paused_at IS NOT NULL
    RETURNING name
)
SELECT EXISTS (SELECT FROM resumed), windlass.wake(false)
