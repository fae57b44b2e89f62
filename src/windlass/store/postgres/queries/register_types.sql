-- register_types: make types and settings known; a row that would not change is not written.
-- $1 names, $2 queues, $3 priorities, $4 max_attempts, $5 retention_seconds, $6 retention,
-- $7 key_retention, $8 max_payload_bytes, $9 on_success, $10 on_failure, $11 max_ages, $12 limit_bys.
-- Rows are taken in sorted order: workers that start together wait for each other once.
WITH settings AS (
    UPDATE windlass.setting AS known
    SET retention = $6, key_retention = $7, max_payload_bytes = $8
    WHERE (known.retention, known.key_retention, known.max_payload_bytes)
        IS DISTINCT FROM ($6::interval, $7::interval, $8::integer)
    RETURNING true
)
INSERT INTO windlass.task_type AS known (
    name, queue, priority, max_attempts, retention_seconds, registered_at, on_success, on_failure, max_age,
    limit_by
)
SELECT
    u.name, u.queue, u.priority, u.max_attempts, u.retention, windlass.clock(),
    u.on_success::jsonb, u.on_failure::jsonb, u.max_age, u.limit_by::jsonb
FROM unnest(
    $1::text[], $2::text[], $3::smallint[], $4::smallint[], $5::integer[], $9::text[], $10::text[],
    $11::float8[], $12::text[]
) AS u (name, queue, priority, max_attempts, retention, on_success, on_failure, max_age, limit_by)
WHERE (SELECT count(*) FROM settings) >= 0  -- which are locked first, by everybody
ORDER BY u.name
ON CONFLICT (name) DO UPDATE
SET queue = excluded.queue,
    priority = excluded.priority,
    max_attempts = excluded.max_attempts,
    retention_seconds = excluded.retention_seconds,
    registered_at = excluded.registered_at,
    on_success = excluded.on_success,
    on_failure = excluded.on_failure,
    max_age = excluded.max_age,
    limit_by = excluded.limit_by
WHERE (
        known.queue, known.priority, known.max_attempts, known.retention_seconds,
        known.on_success, known.on_failure, known.max_age, known.limit_by
    )
    IS DISTINCT FROM (
        excluded.queue, excluded.priority, excluded.max_attempts, excluded.retention_seconds,
        excluded.on_success, excluded.on_failure, excluded.max_age, excluded.limit_by
    )
