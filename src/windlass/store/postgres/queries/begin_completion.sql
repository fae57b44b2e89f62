-- begin_completion: let no lock of a handler's transaction outlive by long a worker that has vanished,
-- or that was stopped in its tracks. $1 idle. Returns when the transaction began.
SELECT
    now() AS begun_at,
    set_config(
        'idle_in_transaction_session_timeout', (extract(epoch FROM $1::interval) * 1000)::bigint::text, true
    )
