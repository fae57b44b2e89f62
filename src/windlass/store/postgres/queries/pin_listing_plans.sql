-- pin_listing_plans: what is listed is found by an index, whatever the statistics say; until the
-- transaction ends, and so does the limit on its idling.
SELECT
    set_config('idle_in_transaction_session_timeout', '5s', true),
    set_config('enable_seqscan', 'off', true),
    set_config('enable_bitmapscan', 'off', true),
    set_config('jit', 'off', true)
