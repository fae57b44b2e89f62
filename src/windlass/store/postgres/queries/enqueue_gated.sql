-- enqueue_gated: the same as enqueue_expiring, of tasks some of which have to pass gates.
-- $1 task_ids, $2 types, $3 queues, $4 priorities, $5 payloads, $6 max_attempts, $7 delays,
-- $8 due_times, $9 keys, $10 tag_lists, $11 retentions, $12 fence_token, $13 fence_task,
-- $14 fence_generation, $15 repeated, $16 caller_commits, $17 expiries, $18 expiry_delays,
-- $19 ordering_keys, $20 keeps_keys, $21 limit_bys
SELECT
    ordinal,
    task_id,
    CASE WHEN $15 OR current_setting('synchronous_standby_names') <> ''
        THEN pg_logical_emit_message(true, 'windlass', 'found') END AS waited
FROM windlass.enqueue_expiring(
    $1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20, $21
)
