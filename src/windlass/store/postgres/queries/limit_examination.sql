-- limit_examination: let a look of the doctor neither take long nor keep anybody waiting.
-- $1 statement_timeout, in milliseconds. Whole tables are joined, and their statistics may be of a time
-- when they were empty: nothing is to be looked up row by row because of that. One core is enough.
SELECT
    set_config('statement_timeout', $1::text, true),
    set_config('lock_timeout', '1s', true),
    set_config('work_mem', '64MB', true),
    set_config('enable_nestloop', 'off', true),
    set_config('max_parallel_workers_per_gather', '0', true),
    set_config('jit', 'off', true)
