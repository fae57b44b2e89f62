-- lock_templates: let one process at a time make a template; released with the session.
SELECT pg_advisory_lock(7463519)
