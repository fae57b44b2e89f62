-- reserve_keys: take idempotency keys in sorted order, before a call in several statements uses them.
-- $1 task_ids, $2 types, $3 payloads, $4 keys
INSERT INTO windlass.idempotency (type, key, task_id, fingerprint)
SELECT u.type, u.key, u.id, hashtextextended(u.payload::jsonb::text, 0)
FROM unnest($1::uuid[], $2::text[], $3::text[], $4::text[]) WITH ORDINALITY
    AS u (id, type, payload, key, ordinal)
ORDER BY u.type COLLATE "C", u.key COLLATE "C", u.ordinal
ON CONFLICT DO NOTHING
