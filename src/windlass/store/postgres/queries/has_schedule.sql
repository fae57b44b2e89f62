-- has_schedule: whether there is such a schedule. $1 name
SELECT EXISTS (SELECT FROM windlass.schedule s WHERE s.name = $1 AND s.retired_at IS NULL)
