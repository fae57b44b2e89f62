-- resume_type: grant tasks of a type again, wake idle workers, and say whether it was paused. $1 type
WITH patience AS MATERIALIZED (SELECT set_config('lock_timeout', '5s', true)), resumed AS (
    DELETE FROM windlass.paused_type p USING patience WHERE p.type = $1 RETURNING true
)
SELECT EXISTS (SELECT FROM resumed), windlass.wake(false)
