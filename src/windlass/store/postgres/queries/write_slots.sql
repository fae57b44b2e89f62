-- write_slots: record what became of slots, and return which were not known before.
-- $1 schedule, $2 decided_at, $3 slot times, $4 states, $5 task_ids, $6 reasons, $7 first times, $8 numbers
INSERT INTO windlass.slot (schedule, decided_at, slot_at, state, task_id, reason, first_at, slots)
SELECT $1, $2, u.slot_at, u.state, u.task_id, u.reason, u.first_at, u.slots
FROM unnest(
    $3::timestamptz[], $4::text[], $5::uuid[], $6::text[], $7::timestamptz[], $8::bigint[]
) AS u (slot_at, state, task_id, reason, first_at, slots)
ON CONFLICT DO NOTHING
RETURNING slot_at
