-- examine_retentions: for how many seconds ended tasks may be kept, by what was registered.
SELECT extract(epoch FROM s.retention)::float8 FROM windlass.setting s
UNION
SELECT extract(epoch FROM s.key_retention)::float8 FROM windlass.setting s
UNION
SELECT t.retention_seconds::float8 FROM windlass.task_type t WHERE t.retention_seconds IS NOT NULL
