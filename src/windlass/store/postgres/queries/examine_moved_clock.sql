-- examine_moved_clock: by how many seconds the schema's clock is ahead of the server's.
SELECT extract(epoch FROM windlass.clock() - clock_timestamp())::float8
