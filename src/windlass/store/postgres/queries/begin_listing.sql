-- begin_listing: all places are read as they were at one moment.
SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY
