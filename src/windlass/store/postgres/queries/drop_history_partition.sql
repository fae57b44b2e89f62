-- drop_history_partition: drop a detached partition with the keys of its tasks. $1 name
SELECT windlass.drop_history_partition($1)
