-- release_slots: record that slots that waited are fired, and return which did wait.
-- $1 schedule, $2 decided_at, $3 slot times, $4 task_ids
UPDATE windlass.slot k
SET state = 'fired', task_id = u.task_id, decided_at = $2, reason = NULL
FROM unnest($3::timestamptz[], $4::uuid[]) AS u (slot_at, task_id)
WHERE k.schedule = $1 AND k.slot_at = u.slot_at AND NOT k.on_request AND k.state = 'waiting'
RETURNING k.slot_at
