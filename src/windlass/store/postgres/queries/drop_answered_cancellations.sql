-- drop_answered_cancellations: requests whose task has ended. Skips what somebody holds.
WITH answered AS MATERIALIZED (
    SELECT q.ctid AS place
    FROM windlass.cancel_request q
    WHERE NOT EXISTS (SELECT FROM windlass.task t WHERE t.id = q.task_id)
    FOR UPDATE OF q SKIP LOCKED
)
DELETE FROM windlass.cancel_request q USING answered a WHERE q.ctid = a.place
