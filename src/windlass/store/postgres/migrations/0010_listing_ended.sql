-- What listings need of ended tasks: their tags, and indexes in places that few tasks come by.
-- What takes long comes first: the locks of the indexes are held until the end.

-- Those that end meanwhile were live when their tags were copied, or enqueued with them since.
INSERT INTO windlass.task_tag (tag, task_id)
SELECT unnest(h.tags), h.id FROM windlass.history h WHERE h.tags IS NOT NULL
UNION
SELECT unnest(d.tags), d.id FROM windlass.dead d WHERE d.tags IS NOT NULL
ON CONFLICT DO NOTHING;

-- Cancelled tasks are few among the completed ones, to which this index costs a comparison. A large
-- partition does without: settlements would wait for it, and retention drops it in its time.
-- The one that is written to comes after those of the days before.
DO $$
DECLARE
    partition regclass;
BEGIN
    FOR partition IN
        SELECT i.inhrelid
        FROM pg_inherits i
        JOIN pg_class c ON c.oid = i.inhrelid
        WHERE i.inhparent = 'windlass.history'::regclass
            AND pg_relation_size(i.inhrelid) < 10000 * current_setting('block_size')::bigint
            -- Those that were made since the last migrations have it.
            AND NOT EXISTS (SELECT FROM pg_index x WHERE x.indrelid = i.inhrelid AND x.indpred IS NOT NULL)
        ORDER BY c.relname
    LOOP
        EXECUTE format('CREATE INDEX ON %s (id) WHERE status = ''cancelled''', partition);
    END LOOP;
END
$$;

CREATE INDEX scheduled_lane ON windlass.scheduled (lane, task_id);
CREATE INDEX dead_status ON windlass.dead (status, id);
