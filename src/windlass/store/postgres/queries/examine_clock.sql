-- examine_clock: the time by the server's own clock, of which the schema's may have been moved.
SELECT clock_timestamp()
