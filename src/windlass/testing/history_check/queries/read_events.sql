-- read_events: everything that was recorded, in order.
SELECT
    n, extract(epoch FROM at)::float8 AS at, extract(epoch FROM began)::float8 AS began,
    x::text AS x, place, change, old_row::text AS old_row, new_row::text AS new_row, term
FROM windlass_history.event
ORDER BY n
