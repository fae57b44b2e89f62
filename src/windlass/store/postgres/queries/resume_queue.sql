-- resume_queue: grant tasks of a queue again, and wake idle workers. $1 name
WITH resumed AS (
    UPDATE windlass.queue
    SET paused_at = NULL
    WHERE name = $1 AND paused_at IS NOT NULL
)
SELECT windlass.wake(false)
