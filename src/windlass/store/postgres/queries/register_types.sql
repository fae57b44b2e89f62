-- register_types: make types known; a row that would not change is not written.
-- $1 names, $2 queues, $3 priorities, $4 max_attempts, $5 retention_seconds.
-- Rows are taken in sorted order: workers that start together wait for each other once.
INSERT INTO windlass.task_type AS known (
    name, queue, priority, max_attempts, retention_seconds, registered_at
)
SELECT u.name, u.queue, u.priority, u.max_attempts, u.retention, windlass.clock()
FROM unnest($1::text[], $2::text[], $3::smallint[], $4::smallint[], $5::integer[])
    AS u (name, queue, priority, max_attempts, retention)
ORDER BY u.name
ON CONFLICT (name) DO UPDATE
SET queue = excluded.queue,
    priority = excluded.priority,
    max_attempts = excluded.max_attempts,
    retention_seconds = excluded.retention_seconds,
    registered_at = excluded.registered_at
WHERE (known.queue, known.priority, known.max_attempts, known.retention_seconds)
    IS DISTINCT FROM
    (excluded.queue, excluded.priority, excluded.max_attempts, excluded.retention_seconds)
