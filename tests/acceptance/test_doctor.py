"""What `windlass doctor` finds: each condition is brought about on a real server, seen, and undone."""

import asyncio
import json
import re
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit
from uuid import UUID, uuid4

import asyncpg
import pytest
from click.testing import CliRunner
from psycopg import pq

from acceptance.doctor_conditions import (
    CONDITIONS,
    ERROR,
    NOTE,
    OK,
    OTHER,
    UNKNOWN,
    WARNING,
    WORKER,
    setting,
)
from acceptance.quick import QUICK
from contract.pgbouncer import BEHIND_POOLER, DEADLINE, Pooler, store_options
from windlass import App, Context, RetryAfter
from windlass.cli import main
from windlass.model.examination import Finding, Level
from windlass.model.task import NewTask, TypeDefaults, WorkerInfo
from windlass.policy.diagnosis import CHECKS, diagnose, storage
from windlass.store.postgres import examining
from windlass.store.postgres.embedded import EmbeddedServer, is_installed
from windlass.store.postgres.examining import Examiner
from windlass.store.postgres.store import PostgresStore
from windlass.store.sqlfiles import SqlFiles
from windlass.testing.databases import drop_database, make_database

ROOT = Path(__file__).parents[2]
LONG = timedelta(hours=1)  # a lease that outlives the tests
# What no amount of work may disturb.
STEADY = {"connection", "migrations", "rights", "places", "keys"}


@pytest.fixture(scope="module")
def patient_sql_url(server_url: str, template: str) -> Iterator[str]:
    """A database in good health: a task that waits, a worker that lives and leads."""
    url = asyncio.run(make_database(server_url, template))
    asyncio.run(nurse(url))
    yield url
    asyncio.run(drop_database(url))


async def nurse(url: str) -> None:
    store = PostgresStore(store_options(url, pooler=False))
    await store.open()
    await store.enqueue([NewTask(uuid4(), "resize", "{}")])
    await store.register_types([TypeDefaults("resize")])
    await store.register(worker(WORKER), lease=LONG)
    leadership = await store.lead(WORKER, current=None, term=LONG)
    assert leadership is not None
    await store.prepare_history(leadership=leadership)
    async with store._run.lend() as connection:
        await connection.execute("UPDATE windlass.worker SET started_at = now() - interval '1 day'")
    await store.close()


def worker(worker_id: UUID, priority: int = 10) -> WorkerInfo:
    registered = (TypeDefaults("resize", priority=priority),)
    return WorkerInfo(
        worker_id, f"host{worker_id.int}", 7, "0.1.0", 1, ("resize",), None, registered
    )


@pytest.fixture
def patient(patient_sql_url: str, suite_pooler: Pooler | None) -> str:
    """The same database for what is tested."""
    return patient_sql_url if suite_pooler is None else suite_pooler.url(patient_sql_url)


@pytest.fixture
async def sql(patient_sql_url: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(patient_sql_url)
    yield connection
    await connection.close()


async def findings(url: str) -> list[Finding]:
    return await App(url).diagnosis()


async def said(url: str, check: str) -> list[tuple[Level, str]]:
    return [(one.level, one.found) for one in await findings(url) if one.check == check]


def tells(found: list[tuple[Level, str]], level: Level, words: str) -> bool:
    return any(one == level and words in text for one, text in found)


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
        "UNION SELECT 'FUNCTION', proname::text FROM pg_proc "
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
            store_options(patient),
            lease=LONG,
            sweep=LONG,
            clock=lambda: datetime.now(UTC) - off,
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


async def test_a_table_that_nobody_may_read_now_costs_only_the_checks_that_need_it(
    patient: str, sql: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with sql.transaction():
        await sql.execute("LOCK TABLE windlass.task IN ACCESS EXCLUSIVE MODE")
        found = await findings(patient)

    unknown = {one.check: one.found for one in found if one.level is UNKNOWN}
    assert unknown.keys() == {"places", "keys"}
    assert "somebody holds a lock" in unknown["places"]


def replace_look(monkeypatch: pytest.MonkeyPatch, name: str, statement: str) -> None:
    read = SqlFiles.statement
    monkeypatch.setattr(
        SqlFiles,
        "statement",
        lambda files, asked: statement if asked == name else read(files, asked),
    )


@pytest.mark.parametrize(
    ("statement", "why"),
    [
        ("SELECT pg_sleep(60)", "it could not be finished within 0.05 s"),
        (
            "CREATE TABLE public.written ()",
            "ReadOnlySQLTransactionError: cannot execute CREATE TABLE in a read-only transaction",
        ),
    ],
)
async def test_a_check_can_neither_take_long_nor_write(
    patient: str, monkeypatch: pytest.MonkeyPatch, statement: str, why: str
) -> None:
    monkeypatch.setattr(examining, "IN_A_WHILE", 0.05)
    replace_look(monkeypatch, "examine_places", statement)

    found = await findings(patient)

    unknown = [(one.check, one.found) for one in found if one.level is UNKNOWN]
    assert unknown == [("places", f"not checked: {why}")]


async def test_a_key_whose_task_is_found_at_the_second_look_is_not_lost(
    patient: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost_at_first = f"SELECT '{OTHER}' AS task_id, 'resize' AS type WHERE $1::uuid[] IS DISTINCT FROM '{{{OTHER}}}'"
    replace_look(monkeypatch, "examine_keys", lost_at_first)

    found = await said(patient, "keys")

    assert found == [(OK, "every idempotency key leads to a task")]


async def test_a_connection_that_breaks_is_an_error_and_what_was_seen_is_told(
    patient: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_look(monkeypatch, "examine_places", "SELECT pg_terminate_backend(pg_backend_pid())")

    found = {one.check: (one.level, one.found) for one in await findings(patient)}

    assert found["connection"][0] is ERROR
    assert "the connection broke" in found["connection"][1]
    assert {check for check, (level, _) in found.items() if level is UNKNOWN} == {"places", "keys"}
    assert found["migrations"][0] is OK


# Rights


@pytest.fixture
async def stranger(server_url: str, sql: asyncpg.Connection) -> AsyncIterator[str]:
    """A role that may connect and nothing else."""
    name = f"stranger_{uuid4().hex}"
    await sql.execute(f"CREATE ROLE {name} LOGIN PASSWORD 'secret'")
    yield name
    await sql.execute(f"DROP OWNED BY {name}; DROP ROLE {name}")


def as_role(role: str, url: str) -> str:
    parts = urlsplit(url)
    address = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{role}:secret@{address}"))


def database_of(url: str) -> str:
    return urlsplit(url).path.removeprefix("/")


async def test_a_role_is_told_what_it_lacks_and_each_advice_helps(
    patient_sql_url: str, sql: asyncpg.Connection, stranger: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WINDLASS_POOLER", raising=False)
    url = as_role(stranger, patient_sql_url)
    # Set here it beats what is set for the role everywhere.
    await sql.execute(f"ALTER ROLE {stranger} IN DATABASE {database_of(url)} SET role = 'none'")

    nothing = await findings(url)
    lacking = [one for one in nothing if one.check == "rights"]
    for one in lacking[:3]:
        assert one.advice is not None
        await sql.execute(one.advice.partition(", unless")[0])
    enqueues = await findings(url)
    async with App(url) as app:
        handle = await app.enqueue("resize", {}, tags=["red"], idempotency_key="k", delay=60)
    for table, column in (
        *(("task", "id"), ("scheduled", "task_id")),
        *(("task_tag", "task_id"), ("idempotency", "task_id")),
    ):
        await sql.execute(f"DELETE FROM windlass.{table} WHERE {column} = '{handle.id}'")
    await sql.execute(f'ALTER TABLE windlass.lane OWNER TO "{stranger}"')
    mixed = await said(url, "rights")
    await sql.execute("ALTER TABLE windlass.lane OWNER TO CURRENT_USER")
    owner = await sql.fetchval("SELECT current_user::text")
    (to_work,) = (one.advice for one in enqueues if one.check == "rights")
    for statement in str(to_work).removeprefix("if workers use it: ").split(", and "):
        await sql.execute(statement)
    works = await said(url, "rights")

    assert [(one.level, one.found.partition(f"'{stranger}' ")[2][:15]) for one in lacking] == [
        (ERROR, "may not use the"),
        (ERROR, "may not read at"),
        (WARNING, "may not enqueue"),
        (NOTE, "does not own at"),
    ]
    assert {one.check for one in nothing if one.level is UNKNOWN} >= {"migrations", "places"}
    assert all("secret" not in f"{one.found} {one.advice}" for one in nothing)
    assert [one.level for one in enqueues if one.check == "rights"] == [NOTE]
    assert [one.level for one in enqueues if one.check in {"migrations", "places"}] == [OK, OK]
    assert any("does not see the transactions of other roles" in one.found for one in enqueues)
    assert [level for level, _ in mixed] == [WARNING]
    assert works == [(OK, f"role '{owner}' may look, enqueue and work")]


SETTINGS = {
    "default_transaction_read_only": "on",
    "idle_in_transaction_session_timeout": "0",
    "default_transaction_isolation": "serializable",
    "synchronous_commit": "off",
    "statement_timeout": "4s",
    "transaction_timeout": "4s",
}


@pytest.mark.parametrize(
    "whose", ["ROLE {role}", "DATABASE {database}", "ROLE {role} IN DATABASE {database}"]
)
async def test_a_setting_is_mended_as_advised_wherever_it_was_made(
    patient_sql_url: str, sql: asyncpg.Connection, stranger: str, whose: str
) -> None:
    url = as_role(stranger, patient_sql_url)
    whose = whose.format(role=stranger, database=database_of(url))
    known = await sql.fetch("SELECT name FROM pg_settings WHERE name = ANY ($1)", [*SETTINGS])
    names = {row["name"] for row in known}  # one of them is not known to older servers

    async def advised() -> dict[str, str]:
        # As behind a pooler, for nothing is set by the connection then.
        found = await App(url, pooler=True).diagnosis()
        texts = [one.advice for one in found if one.advice]
        return {name: text for name in names for text in texts if f"SET {name} =" in text}

    try:
        for name in names:
            await sql.execute(f"ALTER {whose} SET {name} = '{SETTINGS[name]}'")
        before = await advised()
        for advice in before.values():
            await sql.execute(advice.partition(", ")[0])
        after = await advised()
    finally:
        await sql.execute(f"ALTER {whose} RESET ALL")

    assert before.keys() == names
    assert after == {}


# In motion


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


# A server of our own


@pytest.mark.skipif(not is_installed(), reason="needs the embedded extra")
@pytest.mark.needs_direct("a server of its own")
async def test_what_only_the_whole_server_can_be_set_to_is_judged(
    with_data: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "OPEN_NOTE", -1.0)
    settings = {"max_prepared_transactions": "1", "autovacuum": "off", "full_page_writes": "off"}
    server = EmbeddedServer.acquire(with_data(tmp_path / ".windlass"), settings=settings)
    try:
        async with App(server.url):
            pass
        session = await asyncpg.connect(server.url)
        await session.execute("BEGIN; SELECT pg_current_xact_id(); PREPARE TRANSACTION 'forgotten'")
        # Nobody is there to confirm a commit from here on.
        await session.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
        await session.execute("SELECT pg_reload_conf()")
        while await session.fetchval("SHOW synchronous_standby_names") != "nobody":
            await asyncio.sleep(0.01)
        found = await findings(server.url)
        await session.close()
    finally:
        server.release()

    told = {(one.check, one.level): f"{one.found} {one.advice}" for one in found}
    assert "autovacuum or track_counts is off" in told["bloat", WARNING]
    assert "full_page_writes off" in told["durability", WARNING]
    assert "ROLLBACK PREPARED 'forgotten'" in told["transactions", WARNING]
    assert "synchronous_standby_names is 'nobody'" in told["replication", WARNING]


@contextmanager
def standby(url: str, slot: str, start: str, snapshot: int) -> Iterator[None]:
    """Follow a slot as a standby does whose oldest query has this snapshot, and confirm nothing."""
    connection = pq.PGconn.connect(f"{url}&replication=true".encode())
    try:
        begun = connection.exec_(f"START_REPLICATION SLOT {slot} PHYSICAL {start}".encode())
        assert begun.status == pq.ExecStatus.COPY_BOTH, connection.error_message
        feedback = struct.pack("!cqIIII", b"h", 0, snapshot, 0, 0, 0)
        connection.put_copy_data(feedback)
        connection.flush()
        yield
    finally:
        connection.finish()


@pytest.mark.skipif(not is_installed(), reason="needs the embedded extra")
@pytest.mark.needs_direct("a server of its own")
async def test_a_slot_that_holds_back_dead_rows_is_found(
    with_data: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "HELD_BACK", 2)
    monkeypatch.setattr(storage, "RETAINED", -1)
    directory = with_data(tmp_path / ".windlass")
    with (directory / "data" / "pg_hba.conf").open("a") as rules:
        rules.write("local replication all trust\n")
    # A server of its own: no dead row of the others is to stay because of this.
    server = EmbeddedServer.acquire(directory, settings={"fsync": "off"})
    try:
        session = await asyncpg.connect(server.url)
        await session.execute("SELECT pg_create_physical_replication_slot('behind', true)")
        snapshot = int(await session.fetchval("SELECT pg_current_xact_id()::text"))
        start = await session.fetchval("SELECT restart_lsn::text FROM pg_replication_slots")
        with standby(server.url, "behind", start, snapshot):
            async with asyncio.timeout(DEADLINE):
                while not await session.fetchval("SELECT xmin FROM pg_replication_slots"):
                    await asyncio.sleep(0.01)
            for _ in range(3):
                await session.execute("SELECT pg_current_xact_id()")
            followed = await said(server.url, "replication")
        async with asyncio.timeout(DEADLINE):
            while await session.fetchval("SELECT active FROM pg_replication_slots"):
                await asyncio.sleep(0.01)
        left = await said(server.url, "replication")
        await session.execute("SELECT pg_drop_replication_slot('behind')")
        dropped = await said(server.url, "replication")
        await session.close()
    finally:
        server.release()

    assert tells(followed, NOTE, "slot 'behind' is behind by"), followed
    assert tells(followed, WARNING, "'behind' holds back dead rows of"), followed
    assert tells(left, WARNING, "of the write-ahead log, and dead rows"), left
    assert [level for level, _ in dropped] == [OK]


# Around the pooler, and behind one that was not told of


IGNORED = (
    "jit",
    "default_transaction_isolation",
    "idle_in_transaction_session_timeout",
    "tcp_keepalives_idle",
    "tcp_keepalives_interval",
    "tcp_keepalives_count",
)


@pytest.fixture
def lenient_pooler(server_url: str) -> Iterator[Pooler]:
    """One that lets in whoever does not know of it."""
    with Pooler.running(server_url, ignored=IGNORED) as pooler:
        yield pooler


@pytest.mark.skipif(BEHIND_POOLER, reason="has a pooler of its own")
async def test_a_pooler_is_noticed_and_what_it_lacks(
    lenient_pooler: Pooler, patient_sql_url: str, sql_url: str, sql: asyncpg.Connection
) -> None:
    async def told(**settings: Any) -> dict[str, list[tuple[Level, str]]]:
        found = await App(lenient_pooler.url(patient_sql_url), **settings).diagnosis()
        return {
            check: [(one.level, one.found) for one in found if one.check == check]
            for check in ("connection", "pooler", "isolation", "places")
        }

    unaware = await told()
    alone = await told(pooler=True)
    astray = await told(pooler=True, direct_url=sql_url)
    lost = await told(pooler=True, direct_url="postgresql://nobody@127.0.0.1:1/none")
    await sql.execute(setting("default_transaction_isolation", "''serializable''"))
    await sql.execute(setting("idle_in_transaction_session_timeout", "''1 min''"))
    try:
        await lenient_pooler.close_sessions(patient_sql_url)
        around = await told(pooler=True, direct_url=patient_sql_url)
    finally:
        await sql.execute(setting("default_transaction_isolation", None))
        await sql.execute(setting("idle_in_transaction_session_timeout", None))

    assert tells(unaware["pooler"], WARNING, "the setting pooler is off")
    assert tells(alone["pooler"], NOTE, "direct_url is not")
    assert tells(alone["pooler"], NOTE, "idle_in_transaction_session_timeout is not set")
    assert tells(astray["pooler"], WARNING, "direct_url: direct_url leads to database")
    assert tells(lost["pooler"], WARNING, "127.0.0.1:1 cannot be reached")
    assert around["pooler"] == [(OK, "through a pooler, with a way around it")]
    assert tells(around["isolation"], ERROR, "is 'serializable' for role")
    for found in (unaware, alone, astray, lost):
        assert [found[check][0][0] for check in ("connection", "isolation", "places")] == [OK] * 3


# The command


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    monkeypatch.delenv("WINDLASS_APP", raising=False)
    return CliRunner()


def test_the_command_prints_a_line_for_each_check_and_what_to_do(
    told: CliRunner, patient: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WINDLASS_DATABASE_URL", patient)

    done = told.invoke(main, ["doctor"])
    listed = told.invoke(main, ["doctor", "--json"])

    assert (done.exit_code, listed.exit_code) == (0, 0), done.exception
    first_words = [line.split()[:2] for line in done.stdout.splitlines() if line[0] != " "]
    records = json.loads(listed.stdout)
    assert first_words[:-1] == [[record["level"], record["check"]] for record in records]
    assert [set(record) for record in records] == [{"check", "level", "found", "advice"}] * len(
        records
    )
    assert re.search(r"^ +→ ALTER SYSTEM SET fsync = on", done.stdout, re.MULTILINE)
    assert done.stdout.splitlines()[-1].startswith("ok ")


def test_an_empty_database_is_an_error_and_stays_empty(
    told: CliRunner, empty_database_url: str, empty_sql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WINDLASS_DATABASE_URL", empty_database_url)

    done = told.invoke(main, ["doctor"])

    assert done.exit_code == 1, done.exception
    assert "there is no schema 'windlass'" in done.stdout
    assert "→ run: windlass migrate" in done.stdout
    assert asyncio.run(fetchval(empty_sql_url, "SELECT to_regnamespace('windlass')::text")) is None


async def fetchval(url: str, statement: str) -> object:
    connection = await asyncpg.connect(url)
    try:
        return await connection.fetchval(statement)
    finally:
        await connection.close()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("postgresql://clerk:secret@127.0.0.1:1/shop", "127.0.0.1:1 cannot be reached"),
        ("no such database", "does not exist"),
    ],
)
def test_a_database_that_cannot_be_reached_is_named_without_the_password(
    told: CliRunner, server_url: str, monkeypatch: pytest.MonkeyPatch, url: str, words: str
) -> None:
    monkeypatch.delenv("WINDLASS_POOLER", raising=False)
    if "://" not in url:
        url = urlunsplit(urlsplit(server_url)._replace(path="/no_such_database"))
    monkeypatch.setenv("WINDLASS_DATABASE_URL", url)

    done = told.invoke(main, ["doctor", "--json"])

    assert done.exit_code == 1, done.exception
    (record,) = json.loads(done.stdout)
    assert (record["check"], record["level"]) == ("connection", "error")
    assert words in record["found"]
    assert "secret" not in done.output


def test_memory_has_nothing_to_examine(told: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINDLASS_DATABASE_URL", "memory:")

    done = told.invoke(main, ["doctor"])

    assert done.exit_code == 2
    assert "memory:" in done.stderr


# What the page says


async def test_a_task_in_no_place_is_mended_as_the_page_shows(
    database_url: str, sql_url: str
) -> None:
    page = (ROOT / "docs" / "operating.md").read_text().split("### Tasks in the wrong place")[1]
    shown = re.findall(r"```sql\n(.+?)```", page, re.DOTALL)
    (task_id,) = set(re.findall(r"'([0-9a-f-]{36})'", shown[0]))
    store = PostgresStore(store_options(database_url))
    await store.open()
    await store.enqueue([NewTask(UUID(task_id), "resize", "{}")])
    session = await asyncpg.connect(sql_url)

    await session.execute("DELETE FROM windlass.ready; DELETE FROM windlass.lane")
    lost = await said(database_url, "places")
    await session.execute(shown[0])
    mended = await said(database_url, "places")
    await session.execute("UPDATE windlass.ready SET generation = 5")
    other = await said(database_url, "places")
    await session.execute(shown[2])
    in_order = await said(database_url, "places")

    assert tells(lost, ERROR, f"in no place, so that nobody will run it: 1 task ({task_id})")
    assert tells(other, ERROR, "a generation that is not its own")
    assert mended == in_order == [(OK, "every live task is in exactly one place")]
    await session.close()
    await store.close()


def test_every_check_is_explained() -> None:
    page = (ROOT / "docs" / "operating.md").read_text()

    explained = re.findall(
        r"^\| `(\w+)` \|", page.split("## The doctor")[1].split("\n#")[0], re.MULTILINE
    )

    assert explained == ["connection", *CHECKS]
