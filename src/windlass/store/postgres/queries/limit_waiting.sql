-- limit_waiting: let this transaction wait no longer than this for what somebody holds. $1 patience
-- A statement of its own: one that read a table would wait for whoever has locked that before it is limited.
SELECT set_config('lock_timeout', (extract(epoch FROM $1::interval) * 1000)::bigint::text, true)
