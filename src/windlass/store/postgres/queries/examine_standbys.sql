-- examine_standbys: connected standbys, and how far they hold back what may be removed.
SELECT
    r.application_name AS name,
    coalesce(age(r.backend_xmin), 0) AS held_back,
    coalesce(r.sync_state IN ('sync', 'quorum'), false) AS is_synchronous
FROM pg_stat_replication r
WHERE r.state IS NULL OR r.state <> 'backup'
ORDER BY r.application_name
