-- drop_retired_schedules: forget schedules that were retired long ago, with their slots. $1 retention
DELETE FROM windlass.schedule
WHERE retired_at < windlass.clock() - $1::interval
