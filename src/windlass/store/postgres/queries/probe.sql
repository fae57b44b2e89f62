-- probe: in which session this runs, and whether that one is told of new work.
SELECT
    pg_backend_pid() AS session,
    'windlass.wake' IN (SELECT pg_listening_channels()) AS listens
