-- list_returned_cancellations: tasks that came back although their cancellation was asked for.
SELECT q.task_id, q.reason
FROM windlass.cancel_request q
WHERE EXISTS (SELECT FROM windlass.ready r WHERE r.task_id = q.task_id)
    OR EXISTS (SELECT FROM windlass.scheduled s WHERE s.task_id = q.task_id)
LIMIT 100
