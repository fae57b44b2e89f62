-- detach_concurrently: detach without stopping anybody. Takes no parameters and no transaction:
-- PARTITION_NAME is put in by the caller, from list_partitions.
ALTER TABLE windlass.history DETACH PARTITION windlass.PARTITION_NAME CONCURRENTLY
