-- stop_retries: end failed attempts of a type as dead from now on. $1 type, $2 reason
INSERT INTO windlass.stopped_type (type, reason, stopped_at)
VALUES ($1, $2, windlass.clock())
ON CONFLICT (type) DO UPDATE SET reason = excluded.reason, stopped_at = excluded.stopped_at
