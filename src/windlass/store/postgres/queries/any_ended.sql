-- any_ended: whether one of these tasks has ended. $1 task_ids
-- Asked after they were added again: whoever then holds their keys sees how those before it ended.
SELECT EXISTS (
    SELECT FROM unnest($1::uuid[]) AS u (id)
    WHERE EXISTS (SELECT FROM windlass.history h WHERE h.id = u.id)
        OR EXISTS (SELECT FROM windlass.dead d WHERE d.id = u.id)
)
