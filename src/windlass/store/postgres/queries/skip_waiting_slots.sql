-- skip_waiting_slots: record that the slots of schedules that wait are not fired. $1 names, $2 reason
UPDATE windlass.slot
SET state = 'skipped', reason = $2, decided_at = windlass.clock()
WHERE schedule = ANY ($1::text[]) AND state = 'waiting'
