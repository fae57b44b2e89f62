-- tell_of_schedules: wake the leader, if it listens: it may know of no schedule, and look no more than it sweeps.
-- Workers that do not know the word look for work.
SELECT pg_notify('windlass.wake', 'schedules')
