-- add_history_partition: make a place for ended tasks. $1 first, $2 past
SELECT windlass.add_history_partition($1, $2)
