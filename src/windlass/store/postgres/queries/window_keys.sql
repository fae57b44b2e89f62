-- window_keys: what names the windows of these tasks, in their order. $1 kinds, $2 names, $3 payloads
SELECT windlass.window_key(u.kind, u.name, u.payload)
FROM unnest($1::text[], $2::text[], $3::text[]) WITH ORDINALITY AS u (kind, name, payload, ordinal)
ORDER BY u.ordinal
