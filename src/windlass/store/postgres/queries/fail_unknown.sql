-- fail_unknown: fail tasks of a type that no registered worker knows; which.
-- $1 type, $2 error, $3 ready_for, $4 limit, $5 dead_retention, $6 key_retention
SELECT windlass.fail_unknown($1, $2::text::jsonb, $3, $4, $5, $6)
