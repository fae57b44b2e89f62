-- decide_schedule: note up to when a schedule is decided on, and say whether it could be (`is_free`) and was.
-- Nothing is noted if it was changed or decided on meanwhile. It waits for nobody who holds it.
-- $1 name, $2 revision, $3 decided_until as it was read, $4 until, $5 look_at, $6 settled
WITH free AS MATERIALIZED (
    SELECT s.name
    FROM windlass.schedule s
    WHERE s.name = $1
    FOR NO KEY UPDATE SKIP LOCKED
), decided AS (
    UPDATE windlass.schedule s
    SET decided_until = $4, look_at = $5, settled = $6::timestamptz[], paused_at = NULL, resumed_at = NULL
    FROM free f
    WHERE s.name = f.name AND s.revision = $2 AND s.decided_until = $3
    RETURNING true
)
SELECT
    EXISTS (SELECT FROM decided) AS was_decided,
    EXISTS (SELECT FROM free) OR NOT EXISTS (SELECT FROM windlass.schedule s WHERE s.name = $1) AS is_free
