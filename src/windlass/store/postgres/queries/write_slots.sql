-- write_slots: record what became of slots, and return which were not known before, or were skipped and are not now:
-- a clock that had jumped ahead passed over them. One that was fired stays as it is.
-- $1 schedule, $2 decided_at, $3 slot times, $4 states, $5 task_ids, $6 reasons, $7 first times, $8 numbers
INSERT INTO windlass.slot AS k (schedule, decided_at, slot_at, state, task_id, reason, first_at, slots)
SELECT $1, $2, u.slot_at, u.state, u.task_id, u.reason, u.first_at, u.slots
FROM unnest(
    $3::timestamptz[], $4::text[], $5::uuid[], $6::text[], $7::timestamptz[], $8::bigint[]
) AS u (slot_at, state, task_id, reason, first_at, slots)
ON CONFLICT (schedule, slot_at) WHERE NOT on_request DO UPDATE
SET decided_at = excluded.decided_at,
    state = excluded.state,
    task_id = excluded.task_id,
    reason = excluded.reason,
    first_at = excluded.first_at,
    slots = excluded.slots
WHERE k.state = 'skipped' AND excluded.state <> 'skipped'
RETURNING slot_at
