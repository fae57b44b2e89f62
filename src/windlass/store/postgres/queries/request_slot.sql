-- request_slot: record that a schedule is run by hand, and return what it enqueues; nothing if it is not known.
-- $1 name, $2 task_id. Of a repeated call nothing is returned either. Waits for nobody but who retires it.
WITH known AS MATERIALIZED (
    SELECT s.name, s.task
    FROM windlass.schedule s
    WHERE s.name = $1 AND s.retired_at IS NULL
        AND NOT EXISTS (
            SELECT FROM windlass.slot k WHERE k.schedule = s.name AND k.on_request AND k.task_id = $2
        )
    FOR KEY SHARE
), written AS (
    INSERT INTO windlass.slot (schedule, slot_at, on_request, state, decided_at, task_id)
    SELECT k.name, windlass.clock(), true, 'fired', windlass.clock(), $2
    FROM known k
)
SELECT k.task::text
FROM known k
