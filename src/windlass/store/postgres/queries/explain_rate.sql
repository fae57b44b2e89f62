-- explain_rate: how many tasks of some types and queues completed of late, and since when. Looks at the newest tasks
-- that ended, by their ids: those are the last ones that ended while tasks are taken in order.
-- $1 types, $2 queues (NULL: all), $3 not before, $4 how many to look at
SELECT count(*) AS completed, min(k.completed_at) AS since
FROM (
    SELECT h.type, h.queue, h.status, h.completed_at
    FROM windlass.history h
    ORDER BY h.id DESC
    LIMIT $4
) k
WHERE k.status = 'completed' AND k.completed_at > $3
    AND k.type = ANY ($1::text[]) AND ($2::text[] IS NULL OR k.queue = ANY ($2))
