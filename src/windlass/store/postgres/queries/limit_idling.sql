-- limit_idling: let no lock of this transaction outlive by long whoever opened it.
-- Between two statements we never idle: who does has vanished, or was stopped in its tracks.
-- Returns when the transaction began.
SELECT now() AS begun_at, set_config('idle_in_transaction_session_timeout', '5s', true)
