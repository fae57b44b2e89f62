-- detach_finalize: finish a detachment that was interrupted. PARTITION_NAME as above.
ALTER TABLE windlass.history DETACH PARTITION windlass.PARTITION_NAME FINALIZE
