-- read_slots: what became of the last slots of a schedule, the latest first. $1 name, $2 limit
SELECT k.slot_at, k.state, k.decided_at, k.task_id, k.reason, k.first_at, k.slots, k.on_request
FROM windlass.slot k
WHERE k.schedule = $1
ORDER BY k.slot_at DESC, k.on_request DESC
LIMIT $2
