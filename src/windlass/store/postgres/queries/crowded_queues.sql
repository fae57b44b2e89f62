-- crowded_queues: the queues that have more dead tasks than a number; counts all there are. $1 most
SELECT d.queue
FROM windlass.dead d
GROUP BY d.queue
HAVING count(*) > $1::bigint
ORDER BY d.queue
