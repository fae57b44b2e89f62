-- The dead tasks of a queue, first ended first: so that those above its limit are found among any number of others.
CREATE INDEX dead_of_queue ON windlass.dead (queue, completed_at, id);
