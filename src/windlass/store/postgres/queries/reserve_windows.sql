-- reserve_windows: take windows, each given once and in sorted order, before a call in several statements uses them.
-- $1 types, $2 keys, $3 task_ids, $4 seconds, $5 repeated
SELECT windlass.reserve_windows($1, $2, $3, $4, $5)
