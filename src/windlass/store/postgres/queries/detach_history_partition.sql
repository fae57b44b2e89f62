-- detach_history_partition: detach behind a pooler, or give up at once. $1 name
SELECT windlass.detach_history_partition($1)
