-- list_scheduled_lanes: tasks of some lanes that wait for their time, newest first.
-- As many of each lane are read as are asked for, or fewer where there are many lanes: the last row
-- is `is_last` if there may be more, and is returned whether it fits or not.
-- Only the index on (lane, task_id) has this order: by id alone, a lane would be looked for among all.
-- $1 lanes, $2 before, $3 not_before, $4 created_from, $5 created_until, $6 limit
WITH heads AS MATERIALIZED (
    SELECT l.lane, h.task_id
    FROM unnest($1::bigint[]) AS l (lane)
    CROSS JOIN LATERAL (
        SELECT w.task_id
        FROM windlass.scheduled w
        WHERE (w.lane, w.task_id) < (l.lane, $2) AND (w.lane, w.task_id) >= (l.lane, $3)
        ORDER BY w.lane DESC, w.task_id DESC
        LIMIT 1
    ) h
), size AS MATERIALIZED (
    SELECT least($6::bigint, greatest(50, 20000 / greatest(count(*), 1))) AS wanted
    FROM heads
), newest AS MATERIALIZED (
    SELECT h.lane
    FROM heads h
    ORDER BY h.task_id DESC
    LIMIT (SELECT s.wanted FROM size s)
), found AS MATERIALIZED (
    SELECT p.task_id, row_number() OVER (ORDER BY p.task_id DESC) AS place
    FROM newest l
    CROSS JOIN LATERAL (
        SELECT w.task_id
        FROM windlass.scheduled w
        WHERE (w.lane, w.task_id) < (l.lane, $2) AND (w.lane, w.task_id) >= (l.lane, $3)
        ORDER BY w.lane DESC, w.task_id DESC
        LIMIT (SELECT s.wanted FROM size s)
    ) p
    ORDER BY p.task_id DESC
    LIMIT (SELECT s.wanted FROM size s)
)
SELECT k.*
FROM (
    SELECT
        t.id, t.type, t.queue,
        coalesce(t.payload, (SELECT l.payload::jsonb FROM windlass.large_payload l WHERE l.task_id = t.id)) AS payload,
        'scheduled' AS status, t.priority, t.idempotency_key,
        NULL::uuid AS worker_id, t.created_at, t.scheduled_for,
        NULL::timestamptz AS claimed_at, NULL::timestamptz AS started_at, NULL::timestamptz AS completed_at,
        t.created_at AS updated_at,
        t.attempts, t.max_attempts,
        CASE WHEN t.generation > 1 THEN windlass.folded_attempts(t.id) -> -1 ->> 'message' END AS last_error,
        NULL::jsonb AS result, t.tags, t.generation,
        CASE WHEN t.generation > 1 THEN windlass.folded_attempts(t.id) END AS errors,
        t.created_at >= $4 AND t.created_at < $5 AS fits,
        f.place, f.place = (SELECT s.wanted FROM size s) AS is_last
    FROM found f
    JOIN windlass.task t ON t.id = ANY (ARRAY[f.task_id])
) k
WHERE k.fits OR k.is_last
ORDER BY k.place
