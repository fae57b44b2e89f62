"""What may be wrong with a database: how it is brought about in SQL, what is found, how it is undone."""

from uuid import UUID

from windlass.model.examination import Level

WORKER, OTHER = UUID(int=1), UUID(int=2)
OK, NOTE, WARNING, ERROR, UNKNOWN = Level


def setting(name: str, value: str | None) -> str:
    """SQL that sets something for each new session in this database, or puts it back."""
    change = f"RESET {name}" if value is None else f"SET {name} = {value}"
    return f"DO $$ BEGIN EXECUTE format('ALTER DATABASE %I {change}', current_database()); END $$"


def silent(seconds: int) -> str:
    """SQL that enters a worker with a lease of 30 s whose last sign of life was so long ago."""
    return f"""
        INSERT INTO windlass.worker (id, host, pid, version, capacity, types, started_at)
        VALUES ('{OTHER}', 'lost', 9, '0.1.0', 1, '{{resize}}', now() - interval '1 day');
        INSERT INTO windlass.worker_pulse (worker_id, heartbeat_at, expires_at, running, idle)
        SELECT '{OTHER}', s.at, s.at + interval '30 s', 0, false
        FROM (SELECT now() - interval '{seconds} s') AS s (at)
    """


FORGET = f"""
    DELETE FROM windlass.worker WHERE id = '{OTHER}';
    DELETE FROM windlass.worker_pulse WHERE worker_id = '{OTHER}'
"""
PUT_BACK = """
    INSERT INTO windlass.ready (lane, task_id, generation, ready_at)
    SELECT windlass.lane_number(queue, type, priority, 0::smallint), id, generation, now()
    FROM windlass.task
"""
LEAD_ON = f"UPDATE windlass.leadership SET holder = '{WORKER}', expires_at = now() + interval '1 h'"


def clock(ahead: str) -> str:
    return f"""
        CREATE OR REPLACE FUNCTION windlass.clock() RETURNS timestamptz LANGUAGE sql PARALLEL SAFE
        AS 'SELECT clock_timestamp(){ahead}'
    """


CONDITIONS = [
    ("migrations", ERROR, "9999, newer",
        "INSERT INTO windlass.migration (number, name) VALUES (9999, 'from_the_future')",
        "DELETE FROM windlass.migration WHERE number = 9999"),
    ("migrations", ERROR, "lacks 00",
        "UPDATE windlass.migration SET number = 0 WHERE number = (SELECT max(number) FROM windlass.migration)",
        "UPDATE windlass.migration SET number = (SELECT count(*) FROM windlass.migration) WHERE number = 0"),
    ("migrations", ERROR, "there is no schema 'windlass'",
        "ALTER SCHEMA windlass RENAME TO elsewhere",
        "ALTER SCHEMA elsewhere RENAME TO windlass"),
    ("migrations", ERROR, "has all migrations, and yet lacks table task",
        "ALTER TABLE windlass.task RENAME TO x", "ALTER TABLE windlass.x RENAME TO task"),
    ("migrations", ERROR, "lacks view workers",
        "ALTER VIEW windlass.workers RENAME TO x", "ALTER VIEW windlass.x RENAME TO workers"),
    ("migrations", ERROR, "lacks function retry_task",
        "ALTER FUNCTION windlass.retry_task RENAME TO x", "ALTER FUNCTION windlass.x RENAME TO retry_task"),
    ("migrations", ERROR, "column r.ready_at does not exist",
        "ALTER TABLE windlass.ready RENAME ready_at TO y", "ALTER TABLE windlass.ready RENAME y TO ready_at"),
    ("partitions", WARNING, "rest is attached to the history",
        "CREATE TABLE windlass.rest PARTITION OF windlass.history DEFAULT",
        "DROP TABLE windlass.rest"),
    ("partitions", WARNING, "history_20200101_20200102 should have been dropped",
        "CREATE TABLE windlass.history_20200101_20200102 (id integer)",
        "DROP TABLE windlass.history_20200101_20200102"),
    ("workers", NOTE, "lost:9 has been silent for 4", silent(40), FORGET),
    ("workers", WARNING, "lost:9 has been silent for 10 min, and still registered", silent(600), FORGET),
    ("workers", WARNING, "of lost:9 lies ahead", silent(-600), FORGET),
    ("workers", WARNING, "no worker lives, and 1 task could run",
        ("UPDATE windlass.worker_pulse SET heartbeat_at = heartbeat_at - interval '2 h', "
        "expires_at = expires_at - interval '2 h'"),
        ("UPDATE windlass.worker_pulse SET heartbeat_at = heartbeat_at + interval '2 h', "
        "expires_at = expires_at + interval '2 h'")),
    ("leader", WARNING, "nobody leads for 2 min",
        "UPDATE windlass.leadership SET expires_at = now() - interval '121 s'", LEAD_ON),
    ("leader", NOTE, "nobody leads, although",
        "UPDATE windlass.leadership SET expires_at = '-infinity'", LEAD_ON),
    ("leader", WARNING, "by a worker that is not there",
        f"UPDATE windlass.leadership SET holder = '{OTHER}', expires_at = now() + interval '1 day'",
        LEAD_ON),
    ("leader", UNKNOWN, "a row that belongs there is missing",
        "DELETE FROM windlass.leadership",
        f"INSERT INTO windlass.leadership (holder, term, expires_at) VALUES ('{WORKER}', 1, now() + interval '1 h')"),
    ("claims", WARNING, f"1 claim on 3 tasks expired up to 10 min ago and nobody has rescued them: of worker {OTHER}",
        ("INSERT INTO windlass.claim (token, worker_id, claimed_at, expires_at, remaining) "
        f"VALUES (gen_random_uuid(), '{OTHER}', now(), now() - interval '601 s', 3)"),
        "DELETE FROM windlass.claim"),
    ("types", WARNING, "no worker handles 'resize' (1 task",
        "UPDATE windlass.worker SET types = '{other}'", "UPDATE windlass.worker SET types = '{resize}'"),
    ("queues", WARNING, "1 task of 'default'",
        "UPDATE windlass.worker SET queues = '{bulk}'", "UPDATE windlass.worker SET queues = NULL"),
    ("queues", NOTE, "1 task of 'default' in a paused queue",
        "INSERT INTO windlass.queue VALUES ('default', now())", "DELETE FROM windlass.queue"),
    ("due", WARNING, "1 scheduled task should be ready, the first for 5 min",
        ("INSERT INTO windlass.scheduled (task_id, lane, generation, due) "
        "SELECT task_id, lane, generation, now() - interval '301 s' FROM windlass.ready"),
        "DELETE FROM windlass.scheduled"),
    ("places", ERROR, "live and in no place", "DELETE FROM windlass.ready", PUT_BACK),
    ("places", ERROR, "in more than one place",
        ("INSERT INTO windlass.scheduled (task_id, lane, generation, due) "
        "SELECT task_id, lane, generation, now() + interval '1 day' FROM windlass.ready"),
        "DELETE FROM windlass.scheduled"),
    ("places", ERROR, "in more than one place",
        ("WITH c AS (INSERT INTO windlass.claim (token, worker_id, claimed_at, expires_at, remaining) "
        "VALUES (gen_random_uuid(), gen_random_uuid(), now(), now() + interval '1 h', 1) RETURNING token) "
        "INSERT INTO windlass.claim_task SELECT c.token, ARRAY[r.task_id], ARRAY[r.generation] "
        "FROM c, windlass.ready r"),
        "DELETE FROM windlass.claim; DELETE FROM windlass.claim_task"),
    ("places", ERROR, "a generation that is not its own",
        "UPDATE windlass.ready SET generation = 2", "UPDATE windlass.ready SET generation = 1"),
    ("places", ERROR, "although there is no such task",
        ("INSERT INTO windlass.scheduled (task_id, lane, generation, due) "
        "VALUES (gen_random_uuid(), 1, 1, now() + interval '1 day')"),
        "DELETE FROM windlass.scheduled"),
    ("places", ERROR, "although there is no such task",
        ("INSERT INTO windlass.ready (lane, task_id, generation, ready_at) "
        "SELECT lane, gen_random_uuid(), 1, now() FROM windlass.lane"),
        "DELETE FROM windlass.ready WHERE task_id NOT IN (SELECT id FROM windlass.task)"),
    ("places", ERROR, "a lane that is not listed",
        "UPDATE windlass.lane SET lane = lane + 1", "UPDATE windlass.lane SET lane = lane - 1"),
    ("places", ERROR, "held by no claim",
        "INSERT INTO windlass.running SELECT task_id, generation, gen_random_uuid(), now() FROM windlass.ready",
        "DELETE FROM windlass.running"),
    ("places", ERROR, "live although it has ended",
        ("INSERT INTO windlass.dead (id, type, queue, status, priority, max_attempts, attempts, generation, "
        "drop_on, created_at, scheduled_for, completed_at, payload) "
        "SELECT id, type, queue, 'dead', priority, max_attempts, 1, generation, now(), now(), now(), now(), "
        "payload FROM windlass.task"),
        "SET windlass_internal.removing = 'on'; DELETE FROM windlass.dead; RESET windlass_internal.removing"),
    ("keys", WARNING, "1 key of a task that is gone: type 'resize'",
        "INSERT INTO windlass.idempotency VALUES ('resize', 'k', gen_random_uuid(), 1)",
        "DELETE FROM windlass.idempotency"),
    ("bloat", WARNING, "switched off for ready",
        "ALTER TABLE windlass.ready SET (autovacuum_enabled = off)",
        "ALTER TABLE windlass.ready RESET (autovacuum_enabled)"),
    ("bloat", WARNING, "dead_drop_on is not valid",
        "UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'windlass.dead_drop_on'::regclass",
        "UPDATE pg_index SET indisvalid = true WHERE indexrelid = 'windlass.dead_drop_on'::regclass"),
    ("clock", WARNING, "clock() was replaced: it is off by 3 days",
        clock(" + interval ''3 days''"), clock("")),
    ("durability", WARNING, "synchronous_commit is off",
        setting("synchronous_commit", "off"), setting("synchronous_commit", None)),
    ("limits", WARNING, "statement_timeout is 4000 ms",
        setting("statement_timeout", "4000"), setting("statement_timeout", None)),
    ("version", ERROR, "read-only by default",
        setting("default_transaction_read_only", "on"), setting("default_transaction_read_only", None)),
]  # fmt: skip
