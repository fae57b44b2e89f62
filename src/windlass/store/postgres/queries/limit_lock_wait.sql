-- limit_lock_wait: give up on a lock after so long, until the end of the transaction. $1 patience
SELECT set_config('lock_timeout', (extract(epoch FROM $1::interval) * 1000)::bigint::text, true)
