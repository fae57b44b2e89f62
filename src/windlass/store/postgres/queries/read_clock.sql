-- read_clock: the time that leases are measured by.
SELECT windlass.clock()
