-- replay_dead: make new tasks of dead ones; answers in their order.
-- $1 ancestors, $2 new_ids, $3 delays, $4 payloads, $5 again
-- Whoever finds that it was done before has written nothing, and would be answered before the synchronous
-- standbys have it, if the call that did it was broken off in its wait for them: a write makes us wait too.
SELECT answer, task_id, pg_logical_emit_message(true, 'windlass', 'replayed') AS waited
FROM windlass.replay_dead($1, $2, $3, $4, $5)
