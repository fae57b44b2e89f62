-- drop_answered_cancellations: requests whose task has ended.
DELETE FROM windlass.cancel_request q
WHERE NOT EXISTS (SELECT FROM windlass.task t WHERE t.id = q.task_id)
