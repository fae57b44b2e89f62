"""What `windlass doctor` finds: each condition is brought about on a real server, seen, and undone."""

import asyncio
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import asyncpg
import pytest

from acceptance.doctor.conditions import CONDITIONS, ERROR, NOTE, OK, OTHER, WARNING
from acceptance.doctor.findings import LONG, findings, said, tells, worker
from acceptance.quick import QUICK
from contract.pgbouncer import BEHIND_POOLER, DEADLINE, store_options
from windlass import App, Context, RetryAfter
from windlass.model.examination import Finding, Level
from windlass.policy.diagnosis import CHECKS, diagnose, storage
from windlass.store.postgres import examining
from windlass.store.postgres.examining import Examiner
from windlass.store.postgres.store import PostgresStore
from windlass.store.sqlfiles import SqlFiles

# What no amount of work may disturb.
STEADY = {"connection", "migrations", "rights", "places", "keys"}


async def test_a_healthy_database_gives_no_warning(patient: str) -> None:
    found = await findings(patient)

    # The tests do without fsync, and other tests share the server.
    others = {"durability", "replication", "limits"} | ({"pooler"} if BEHIND_POOLER else set())
    levels = {one.check: one.level for one in found if one.check not in others}
    assert levels == dict.fromkeys({"connection", *CHECKS} - others, OK)
    assert [one.found for one in found if one.check == "durability"] == [
        "fsync off: a crash of the host can destroy the database"
    ]


@pytest.mark.parametrize(
    ("check", "level", "words", "bring_about", "undo"),
    CONDITIONS,
    ids=[f"{check}: {words}" for check, _, words, *_ in CONDITIONS],
)
async def test_a_condition_is_found_and_gone_when_it_is_undone(
    patient: str,
    sql: asyncpg.Connection,
    check: str,
    level: Level,
    words: str,
    bring_about: str,
    undo: str,
) -> None:
    if BEHIND_POOLER and "ALTER DATABASE" in bring_about:
        pytest.skip("sessions of the pooler keep the settings they began with")

    await sql.execute(bring_about)
    try:
        during = await findings(patient)
    finally:
        await sql.execute(undo)
    after = await said(patient, check)

    of_check = [(one.level, one.found) for one in during if one.check == check]
    assert tells(of_check, level, words), of_check
    assert all(one.advice for one in during if one.level in {NOTE, WARNING, ERROR})
    assert not any(words in text for _, text in after), after
    assert {one.check for one in during} == {"connection", *CHECKS}


async def test_all_that_the_migrations_make_is_looked_for(sql_url: str) -> None:
    session = await asyncpg.connect(sql_url)
    there = await session.fetch(
        "SELECT CASE relkind WHEN 'v' THEN 'VIEW' ELSE 'TABLE' END, relname::text FROM pg_class "
        "WHERE relnamespace = 'windlass'::regnamespace AND relkind IN ('r', 'p', 'v') "
        "UNION SELECT CASE prokind WHEN 'p' THEN 'PROCEDURE' ELSE 'FUNCTION' END, proname::text FROM pg_proc "
        "WHERE pronamespace = 'windlass'::regnamespace"
    )
    await session.close()

    made = examining.made_by(SqlFiles("windlass.store.postgres", "windlass").migrations())

    # That of the migrations is made before them; that there is one is looked at by itself.
    assert {*made, ("TABLE", "migration")} == {tuple(row) for row in there}


async def test_a_partition_that_is_half_detached_and_then_missing_is_found(
    patient: str, patient_sql_url: str, sql: asyncpg.Connection
) -> None:
    files = SqlFiles("windlass.store.postgres", "windlass")
    # Not the last one, which may have become due today: the leader makes it within the hour.
    name = (await sql.fetch(files.statement("list_partitions")))[-2]["name"]
    _, first, past = name.split("_")
    detach = f"ALTER TABLE windlass.history DETACH PARTITION windlass.{name}"
    reader = await asyncpg.connect(patient_sql_url)
    await reader.execute("BEGIN; SELECT FROM windlass.history")
    leader = await asyncpg.connect(patient_sql_url)

    detaching = asyncio.create_task(leader.execute(f"{detach} CONCURRENTLY"))
    async with asyncio.timeout(DEADLINE):
        while not await sql.fetchval("SELECT bool_or(inhdetachpending) FROM pg_inherits"):
            await asyncio.sleep(0.01)
    await sql.execute("SELECT pg_cancel_backend($1)", leader.get_server_pid())
    with pytest.raises(asyncpg.QueryCanceledError):
        await detaching
    await leader.close()
    pending = await said(patient, "partitions")
    await reader.close()
    await sql.execute(f"{detach} FINALIZE")
    missing = await said(patient, "partitions")
    await sql.execute(
        f"ALTER TABLE windlass.history ATTACH PARTITION windlass.{name} "
        f"FOR VALUES FROM ('{first}') TO ('{past}')"
    )

    day = f"{first[:4]}-{first[4:6]}-{first[6:]}"
    assert tells(pending, NOTE, f"{name} is half detached"), pending
    assert tells(missing, WARNING, f"for tasks that may go on {day}"), missing
    assert [level for level, _ in await said(patient, "partitions")] == [OK]


async def test_types_that_workers_registered_otherwise_are_found(
    patient: str, sql: asyncpg.Connection
) -> None:
    store = PostgresStore(store_options(patient))
    await store.open()
    await store.register(worker(OTHER, priority=30), lease=LONG)

    try:
        found = await said(patient, "types")
    finally:
        await store.deregister(OTHER)
        await store.close()

    words = "type 'resize' differs between workers: priority 10 by host1:7; priority 30 by host2:7"
    assert tells(found, WARNING, words), found
    assert (await said(patient, "types"))[0][0] is OK


async def test_workers_of_two_versions_of_an_app_differ(database_url: str) -> None:
    apps = [App(database_url, **QUICK), App(database_url, **QUICK)]
    for app, attempts in zip(apps, (2, 5), strict=True):

        @app.task(name="resize", retry=attempts)
        async def resize() -> None: ...

    async with apps[0].worker(), apps[1].worker():
        found = await said(database_url, "types")

    assert tells(found, WARNING, "type 'resize' differs between workers: max_attempts 2 by"), found
    assert tells(found, WARNING, "; what counts is queue 'default', priority 10, max_attempts 5")


async def test_dead_rows_that_nobody_removes_are_found(
    patient: str, sql: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "MANY_DEAD", 50)
    await sql.execute("ALTER TABLE windlass.cancel_request SET (autovacuum_enabled = off)")
    await sql.execute(
        "INSERT INTO windlass.cancel_request SELECT gen_random_uuid(), '', now() FROM generate_series(1, 100)"
    )
    await sql.execute("DELETE FROM windlass.cancel_request")
    await sql.execute("SELECT pg_stat_force_next_flush()")

    found = await said(patient, "bloat")
    await sql.execute("VACUUM windlass.cancel_request")
    await sql.execute("ALTER TABLE windlass.cancel_request RESET (autovacuum_enabled)")
    await sql.execute("SELECT pg_stat_force_next_flush()")

    assert tells(found, WARNING, "cancel_request 100 beside 0 (never vacuumed)"), found
    assert (await said(patient, "bloat"))[0][0] is OK


async def test_an_old_snapshot_and_an_idle_holder_of_locks_are_found(
    patient: str, patient_sql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examining, "MENTION_AFTER", 0.0)
    monkeypatch.setattr(storage, "OPEN_NOTE", 0.0)
    monkeypatch.setattr(storage, "LOCK_NOTE", 0.0)
    reader = await asyncpg.connect(
        patient_sql_url, server_settings={"application_name": "a report"}
    )
    pid = reader.get_server_pid()

    await reader.execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT FROM windlass.task")
    found = await findings(patient)
    await reader.execute("COMMIT")
    after = await findings(patient)
    await reader.close()

    named = f"session {pid} (a report)"
    told = {one.check: one.found for one in found if named in one.found}
    assert told.keys() == {"transactions", "locks"}
    assert "idle in transaction" in told["transactions"]
    assert "holds task" in told["locks"]
    assert [one for one in after if named in one.found] == []


async def test_a_slot_without_a_consumer_is_found(patient: str, sql: asyncpg.Connection) -> None:
    name = f"slot_{uuid4().hex}"
    if await sql.fetchval("SHOW wal_level") == "minimal":
        pytest.skip("SLOTS NOT TESTED: wal_level is minimal")
    await sql.execute(f"SELECT pg_create_physical_replication_slot('{name}', true)")

    try:
        found = await said(patient, "replication")
    finally:
        await sql.execute(f"SELECT pg_drop_replication_slot('{name}')")

    assert tells(found, WARNING, f"slot '{name}' has no consumer"), found
    assert not any(name in text for _, text in await said(patient, "replication"))


async def test_a_clock_that_differs_from_ours_is_found(patient: str) -> None:
    def examiner(off: timedelta) -> Examiner:
        return Examiner(
            store_options(patient), lease=LONG, sweep=LONG, clock=lambda: datetime.now(UTC) - off
        )

    found = {
        seconds: next(
            (one.level, one.found)
            for one in diagnose(await examiner(timedelta(seconds=seconds)).examine())
            if one.check == "clock"
        )
        for seconds in (0, 30, -90)
    }

    assert [level for level, _ in found.values()] == [OK, NOTE, WARNING]
    assert "30 s ahead of this host's" in found[30][1]
    assert "90 s behind this host's" in found[-90][1]


async def test_tasks_in_motion_are_never_found_in_the_wrong_place(database_url: str) -> None:
    app = App(database_url, **QUICK)
    turns = dict[str, int]()

    @app.task(retry=3)
    async def restless(ctx: Context, number: int) -> None:
        turn = turns[ctx.task_id] = turns.get(ctx.task_id, 0) + 1
        if number % 4 == 0 and turn == 1:
            raise RetryAfter(0.01)
        if number % 4 == 1:
            async with ctx.transaction():
                await asyncio.sleep(0.01)

    looks, wrong = 0, list[Finding]()
    async with app, app.worker(concurrency=50):
        handles = await app.enqueue_many(
            restless.options(
                delay=0.3 if number % 5 == 0 else None,
                idempotency_key=str(number) if number % 3 == 0 else None,
            ).call(number)
            for number in range(3000)
        )
        cancelling = asyncio.gather(*(handle.cancel() for handle in handles[::50]))
        store = await app.store()
        while await store.has_work(["restless"], None) or looks < 5:
            found = await app.diagnosis()
            wrong += [one for one in found if one.check in STEADY and one.level is not OK]
            looks += 1
        await cancelling

    assert wrong == []
    assert len(turns) > 2000
