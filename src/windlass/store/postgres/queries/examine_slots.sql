-- examine_slots: replication slots, what they keep of the write-ahead log, and which rows of tables.
-- `held_back` counts the transactions since the oldest one whose dead rows may not be removed.
SELECT
    s.slot_name::text AS name,
    s.active AS is_active,
    s.wal_status,
    coalesce(
        pg_wal_lsn_diff(
            CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_lsn() END,
            s.restart_lsn
        ),
        0
    )::bigint AS retained_bytes,
    coalesce(age(s.xmin), 0) AS held_back
FROM pg_replication_slots s
WHERE NOT s.temporary
ORDER BY s.slot_name
