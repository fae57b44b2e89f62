-- await_standbys: let this transaction's commit wait for the standbys that a write would wait for.
-- One that finds everything written already writes nothing: it would be acknowledged before they
-- have what the call that was broken off has written.
SELECT pg_logical_emit_message(true, 'windlass', 'repeated')
