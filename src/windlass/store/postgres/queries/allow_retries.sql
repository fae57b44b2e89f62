-- allow_retries: try tasks of a type again; true if that was stopped. $1 type
WITH gone AS (
    DELETE FROM windlass.stopped_type s WHERE s.type = $1 RETURNING true
)
SELECT EXISTS (SELECT FROM gone)
