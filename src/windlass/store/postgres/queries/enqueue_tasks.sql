-- enqueue_tasks: add all tasks or none; returns those that were there before.
-- $1 task_ids, $2 types, $3 queues, $4 priorities, $5 payloads, $6 max_attempts, $7 delays,
-- $8 due_times, $9 keys, $10 tag_lists, $11 retentions, $12 fence_token, $13 fence_task,
-- $14 fence_generation, $15 repeated, $16 caller_commits
-- Whoever finds a task has written nothing, and would be answered before the disk has it or the synchronous
-- standbys do, if the call that wrote it was broken off in its wait for them: a write makes us wait too.
-- Before the disk has it only a task without a key can be seen (enqueue_now), which is found by its id.
SELECT
    ordinal,
    task_id,
    CASE WHEN $15 OR current_setting('synchronous_standby_names') <> ''
        THEN pg_logical_emit_message(true, 'windlass', 'found') END AS waited
FROM windlass.enqueue_tasks(
    $1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16
)
