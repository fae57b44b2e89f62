-- is_careless: whether the server waits for no disk, so that to copy a database file by file costs least:
-- elsewhere the checkpoints that this takes would have to be waited for.
SELECT NOT current_setting('fsync')::boolean
