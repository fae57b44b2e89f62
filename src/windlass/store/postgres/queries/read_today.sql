-- read_today: the day it is, by the store's clock.
SELECT (windlass.clock() AT TIME ZONE 'UTC')::date
