-- enqueue_now: add a task that is due now and has no key and no tag.
-- $1 task_id, $2 payload, $3 type, $4 queue, $5 priority, $6 max_attempts, $7 retention
CALL windlass.enqueue_now($1, $2, $3, $4, $5, $6, $7)
