"""Behind a real PgBouncer in transaction mode, where no session is ours for longer than that."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from itertools import count, pairwise
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from contract.pgbouncer import DEADLINE, SESSIONS, Pooler
from contract.postgres_clock import PostgresClock
from windlass import App, ConfigurationError, StoreUnavailable
from windlass.model.task import (
    Answer,
    CancelAnswer,
    Claim,
    ClaimRequest,
    Leadership,
    NewTask,
    Outcome,
    Retained,
    Settlement,
    TaskFilter,
    TaskState,
)
from windlass.store.postgres import listener
from windlass.store.postgres.store import PostgresOptions, PostgresStore

WORKER, OTHER = UUID(int=1), UUID(int=2)
LEASE = timedelta(seconds=30)
TERM = timedelta(seconds=15)
DAY = timedelta(days=1)
NOON = datetime(2027, 3, 3, 12, tzinfo=UTC)
OVER = "history_20270303_20270304"  # where a task rests that ended at noon and may go at once
ERROR = '{"type": "ValueError", "message": "no such image"}'
NOWHERE = "postgresql://nobody@127.0.0.1:1/none"  # where nothing listens
ROUNDS = 200
TASKS = 200
AROUND = {"application_name": "around"}  # a session that is not of the pooler

_numbers = count(1)


@pytest.fixture
def pooler(server_url: str) -> Iterator[Pooler]:
    with Pooler.running(server_url) as pooler:
        yield pooler


@pytest.fixture
def pooled_url(pooler: Pooler, sql_url: str) -> str:
    return pooler.url(sql_url)


@pytest.fixture
async def clock(sql_url: str) -> AsyncIterator[PostgresClock]:
    clock = await PostgresClock.install(sql_url)
    yield clock
    await clock.close()


@pytest.fixture
async def watcher(sql_url: str) -> AsyncIterator[asyncpg.Connection]:
    """A session around the pooler that sees all others."""
    connection = await asyncpg.connect(sql_url, server_settings=AROUND)
    yield connection
    await connection.close()


@pytest.fixture
async def store(pooled_url: str) -> AsyncIterator[PostgresStore]:
    store = PostgresStore(PostgresOptions(url=pooled_url, pooler=True))
    await store.open()
    yield store
    await store.close()


@pytest.fixture
async def other_store(pooled_url: str) -> AsyncIterator[PostgresStore]:
    store = PostgresStore(PostgresOptions(url=pooled_url, pooler=True))
    await store.open()
    yield store
    await store.close()


# Steps


def new_task(**options: Any) -> NewTask:
    task_id = UUID(int=1_700_000_000_000 << 80 | 7 << 76 | 2 << 62 | next(_numbers))
    asked: dict[str, Any] = {"id": task_id, "type": "resize", "payload": "{}"}
    return NewTask(**(asked | options))


async def enqueue(store: PostgresStore, **options: Any) -> UUID:
    (answer,) = await store.enqueue([new_task(**options)])
    assert answer.created
    return answer.id


async def claim(store: PostgresStore, worker: UUID = WORKER, limit: int = 1) -> Claim | None:
    request = ClaimRequest(worker, ("resize",), limit, LEASE, timedelta(seconds=6))
    return (await store.claim(request)).claim


async def settle(
    store: PostgresStore, held: Claim | None, outcome: Outcome = Outcome.COMPLETED
) -> list[UUID]:
    """End what was claimed; return what this call brought to its end."""
    if held is None:
        return []
    error = ERROR if outcome is Outcome.DEAD else None
    settlements = [
        Settlement(held.token, task.id, task.generation, outcome, error=error)
        for task in held.tasks
    ]
    answers = await store.settle(settlements)
    return [
        one.task_id
        for one, answer in zip(settlements, answers, strict=True)
        if answer is Answer.APPLIED
    ]


async def end(store: PostgresStore, outcome: Outcome = Outcome.COMPLETED, **options: Any) -> UUID:
    task_id = await enqueue(store, **options)
    assert await settle(store, await claim(store), outcome) == [task_id]
    return task_id


async def status(store: PostgresStore, task_id: UUID) -> TaskState:
    return (await store.get(task_id)).status


async def lead(store: PostgresStore) -> Leadership:
    leadership = await store.lead(WORKER, current=None, term=TERM)
    assert leadership is not None
    return leadership


async def sessions(watcher: asyncpg.Connection) -> list[int]:
    """The sessions of the test's database, but for those around the pooler."""
    rows = await watcher.fetch(
        "SELECT pid FROM pg_stat_activity WHERE datname = current_database() "
        "AND backend_type = 'client backend' "  # a vacuum of the server's own is listed too
        "AND application_name NOT IN ('around', 'windlass')"
    )
    return [row["pid"] for row in rows]


async def exercise(store: PostgresStore) -> None:
    """Many calls at once, so that the pool of the store and all sessions are used."""

    async def rounds(worker: UUID) -> None:
        for _ in range(10):
            await enqueue(store)
            await settle(store, await claim(store, worker))
            await store.queues()

    await asyncio.gather(*(rounds(UUID(int=100 + number)) for number in range(8)))


# The pooler is one


async def test_the_pooler_shares_sessions_and_refuses_startup_parameters(pooled_url: str) -> None:
    with pytest.raises(asyncpg.PostgresError, match="unsupported startup parameter: jit"):
        await asyncpg.connect(pooled_url, server_settings={"jit": "off"})
    ours = [await asyncpg.connect(pooled_url, statement_cache_size=0) for _ in range(5)]
    try:
        await asyncio.gather(*(one.execute("SELECT pg_sleep(0.05)") for one in ours))
        used = [await ours[0].fetchval("SELECT pg_backend_pid()") for _ in range(6)]
        assert len(set(used)) == SESSIONS
        assert all(one != next_one for one, next_one in pairwise(used))
    finally:
        for one in ours:
            await one.close()


# The store


async def test_who_does_not_know_of_the_pooler_is_told_what_to_set(pooled_url: str) -> None:
    store = PostgresStore(PostgresOptions(url=pooled_url))

    with pytest.raises(ConfigurationError, match="pooler=True"):
        await store.open()


async def test_the_store_opens_and_migrates_through_the_pooler(
    pooler: Pooler, empty_sql_url: str
) -> None:
    options = PostgresOptions(url=pooler.url(empty_sql_url), pooler=True)
    stores = [PostgresStore(options) for _ in range(3)]
    try:
        assert await stores[0].schema.pending()

        await asyncio.gather(*(store.open() for store in stores))

        assert await stores[0].schema.pending() == []
        task_id = await end(stores[0])
        assert await status(stores[1], task_id) is TaskState.COMPLETED
    finally:
        for store in stores:
            await store.close()


async def test_a_store_without_a_way_around_the_pooler_opens_if_there_is_nothing_to_migrate(
    pooled_url: str, pooler: Pooler, empty_sql_url: str
) -> None:
    for url, opens in ((pooled_url, True), (pooler.url(empty_sql_url), False)):
        store = PostgresStore(PostgresOptions(url=url, pooler=True, direct_url=NOWHERE))
        try:
            with (
                nullcontext()
                if opens
                else pytest.raises(StoreUnavailable, match=r"direct_url, .*127\.0\.0\.1:1")
            ):
                await store.open()
        finally:
            await store.close()


async def test_no_migration_is_applied_to_another_database_than_the_one_that_is_used(
    pooled_url: str, sql_url: str, empty_sql_url: str
) -> None:
    connection = await asyncpg.connect(sql_url)
    await connection.execute("DROP SCHEMA windlass CASCADE")
    await connection.close()
    options = PostgresOptions(url=pooled_url, pooler=True, direct_url=empty_sql_url)
    with pytest.raises(ConfigurationError, match=r"direct_url leads to database '.*'.*nothing was"):
        await PostgresStore(options).open()

    elsewhere = PostgresStore(PostgresOptions(url=empty_sql_url, auto_migrate=False))
    assert len(await elsewhere.schema.pending()) == len(elsewhere._sql.migrations())


async def test_every_step_of_a_task_works_through_the_pooler(
    store: PostgresStore, clock: PostgresClock
) -> None:
    completed = await end(store, idempotency_key="k", tags=("a",))
    assert await status(store, completed) is TaskState.COMPLETED
    (again,) = await store.enqueue([new_task(idempotency_key="k")])
    assert (again.id, again.created) == (completed, False)

    dead = await end(store, Outcome.DEAD)
    assert await status(store, dead) is TaskState.DEAD
    await store.retry(dead)
    assert await status(store, dead) is TaskState.PENDING
    assert await settle(store, await claim(store)) == [dead]

    waiting = await enqueue(store)
    assert await store.cancel(waiting, "no need") is CancelAnswer.CANCELLED
    assert await status(store, waiting) is TaskState.CANCELLED

    lost = await enqueue(store)
    held = await claim(store)
    await clock.advance(2 * LEASE)
    leadership = await lead(store)
    assert (await store.rescue(100, leadership=leadership)).returned == 1
    assert await settle(store, held) == []
    assert await settle(store, await claim(store, OTHER)) == [lost]

    later = await enqueue(store, delay=60.0)
    assert await status(store, later) is TaskState.SCHEDULED
    assert await claim(store) is None
    await clock.advance(timedelta(seconds=61))
    leadership = await lead(store)
    assert await store.lead(OTHER, current=None, term=TERM) is None
    assert await store.promote(100, leadership=leadership) == 1
    assert await settle(store, await claim(store)) == [later]

    await store.resign(leadership)
    assert await store.lead(OTHER, current=None, term=TERM) is not None


async def test_more_calls_than_sessions_are_carried_out(
    store: PostgresStore, watcher: asyncpg.Connection
) -> None:
    await exercise(store)

    assert len(await sessions(watcher)) == SESSIONS
    assert await claim(store) is None
    page = await store.tasks(TaskFilter(statuses=(TaskState.COMPLETED,), limit=1000))
    assert len(page.records) == 80


async def test_a_large_enqueue_stays_in_one_transaction(
    store: PostgresStore, other_store: PostgresStore
) -> None:
    large = [new_task(idempotency_key=f"k{number}") for number in range(4500)]
    same = [new_task(idempotency_key=f"k{number}") for number in range(4500)]

    first, second, _ = await asyncio.gather(
        store.enqueue(large), other_store.enqueue(same), exercise(other_store)
    )

    assert [one.created != other.created for one, other in zip(first, second, strict=True)] == (
        [True] * len(large)
    )
    assert len({one.created for one in first}) == 1
    assert [one.id for one in first] == [one.id for one in second]


async def test_nothing_of_ours_stays_in_a_session(
    store: PostgresStore, pooled_url: str, watcher: asyncpg.Connection
) -> None:
    await exercise(store)
    leadership = await lead(store)
    await store.prepare_history(leadership=leadership)
    await store.tidy(leadership=leadership)
    await store.retain(leadership=leadership)

    # Looking up array types, the driver switches `jit` off for the session and on again: outside
    # a transaction the second would reach whichever session is next.
    stays = """
        SELECT 'statement ' || name FROM pg_prepared_statements
        UNION ALL SELECT 'channel ' || pg_listening_channels()
        UNION ALL SELECT 'lock ' || locktype FROM pg_locks
            WHERE pid = pg_backend_pid() AND locktype = 'advisory'
        UNION ALL SELECT 'setting ' || name FROM pg_settings
            WHERE source = 'session' AND setting <> reset_val
            AND name NOT IN ('client_encoding', 'application_name')  -- PgBouncer's own
        UNION ALL SELECT 'table ' || relname FROM pg_class WHERE relpersistence = 't'
    """
    looked_at: set[int] = set()
    connection = await asyncpg.connect(pooled_url, statement_cache_size=0)
    try:
        for _ in range(5):
            newcomer = PostgresStore(PostgresOptions(url=pooled_url, pooler=True))
            await newcomer.open()
            await exercise(newcomer)
            await newcomer.close()
            for _ in range(4 * SESSIONS):
                async with connection.transaction():
                    looked_at.add(await connection.fetchval("SELECT pg_backend_pid()"))
                    assert [row[0] for row in await connection.fetch(stays)] == []
    finally:
        await connection.close()
    assert looked_at == set(await sessions(watcher))


async def test_two_stores_that_take_turns_lose_nothing(
    store: PostgresStore, other_store: PostgresStore
) -> None:
    enqueued: list[UUID] = []
    settled: list[UUID] = []

    async def rounds(own: PostgresStore, worker: UUID) -> None:
        for _ in range(ROUNDS):
            answers = await own.enqueue([new_task(), new_task()])
            enqueued.extend(answer.id for answer in answers)
            settled.extend(await settle(own, await claim(own, worker, limit=3)))

    await asyncio.gather(rounds(store, WORKER), rounds(other_store, OTHER))
    for own in (store, other_store):
        while (held := await claim(own, limit=50)) is not None:
            settled.extend(await settle(own, held))

    assert len(enqueued) == 4 * ROUNDS
    assert sorted(settled) == sorted(enqueued)
    ended, unknown = await store.ended(enqueued)
    assert unknown == []
    assert [one.status for one in ended] == [TaskState.COMPLETED] * len(enqueued)


# Retention


async def open_reader(url: str) -> asyncpg.Connection:
    """A report on all of history that is not done."""
    reader = await asyncpg.connect(url, server_settings=AROUND)
    await reader.execute("BEGIN")
    await reader.fetchval("SELECT count(*) FROM windlass.history")
    return reader


async def partitions(store: PostgresStore, watcher: asyncpg.Connection) -> dict[str, Any]:
    rows = await watcher.fetch(store._sql.statement("list_partitions"))
    return {row["name"]: (row["attached"], row["pending"]) for row in rows}


async def test_behind_the_pooler_retention_drops_a_day_that_is_over(
    store: PostgresStore, clock: PostgresClock, watcher: asyncpg.Connection
) -> None:
    await clock.freeze(NOON)
    over = await end(store, retention=timedelta(0))
    kept = await end(store, retention=2 * DAY)
    assert OVER in await partitions(store, watcher)
    await clock.freeze(NOON + DAY)

    assert await store.retain(leadership=await lead(store)) == Retained(partitions=1)

    assert OVER not in await partitions(store, watcher)
    _, unknown = await store.ended([over, kept])
    assert unknown == [over]


async def test_behind_the_pooler_retention_gives_up_at_once_beside_a_reader(
    store: PostgresStore, clock: PostgresClock, watcher: asyncpg.Connection, sql_url: str
) -> None:
    await clock.freeze(NOON)
    await end(store, retention=timedelta(0))
    await clock.freeze(NOON + DAY)
    leadership = await lead(store)
    reader = await open_reader(sql_url)
    took: list[float] = []

    async def settle_on(stop: asyncio.Event) -> None:
        while not stop.is_set():
            began = time.monotonic()
            await end(store)
            took.append(time.monotonic() - began)

    stop = asyncio.Event()
    settling = asyncio.create_task(settle_on(stop))
    try:
        for _ in range(5):
            ended = len(took)
            async with asyncio.timeout(2):
                assert await store.retain(leadership=leadership) == Retained(waiting=(OVER,))
            assert (await partitions(store, watcher))[OVER] == (True, False)
            async with asyncio.timeout(2):
                while len(took) < ended + 2:  # one under way, and one after it
                    await asyncio.sleep(0.005)
    finally:
        stop.set()
        await settling
        reader.terminate()
    assert max(took) < 2

    deadline = time.monotonic() + DEADLINE
    while (retained := await store.retain(leadership=leadership)).waiting:
        assert time.monotonic() < deadline, "the reader has not gone"
    assert retained == Retained(partitions=1)
    assert OVER not in await partitions(store, watcher)


async def test_nothing_is_dropped_in_another_database_than_the_one_that_is_used(
    pooled_url: str, shared_sql_url: str
) -> None:
    """The way around the pooler leads to another installation, which may keep its tasks longer."""
    options = PostgresOptions(url=pooled_url, pooler=True, direct_url=shared_sql_url)
    store = PostgresStore(options)
    await store.open()
    try:
        leadership = await lead(store)
        with pytest.raises(ConfigurationError, match="direct_url leads to database"):
            await store.retain(leadership=leadership)
    finally:
        await store.close()


async def test_with_a_direct_url_retention_detaches_concurrently_around_the_pooler(
    pooled_url: str, sql_url: str, clock: PostgresClock, watcher: asyncpg.Connection
) -> None:
    options = PostgresOptions(url=pooled_url, pooler=True, direct_url=sql_url)
    store = PostgresStore(options)
    await store.open()
    reader = None
    try:
        await clock.freeze(NOON)
        await end(store, retention=timedelta(0))
        await clock.freeze(NOON + DAY)
        leadership = await lead(store)
        reader = await open_reader(sql_url)

        retaining = asyncio.create_task(store.retain(leadership=leadership))
        waits = (
            "SELECT query, application_name FROM pg_stat_activity "
            "WHERE wait_event_type = 'Lock' AND $1 = ANY (pg_blocking_pids(pid))"
        )
        deadline = time.monotonic() + DEADLINE
        while (waiting := await watcher.fetchrow(waits, reader.get_server_pid())) is None:
            assert not retaining.done(), f"did not wait: {retaining}"
            assert time.monotonic() < deadline, "never waited"
            await asyncio.sleep(0.005)
        assert f"DETACH PARTITION windlass.{OVER} CONCURRENTLY" in waiting["query"]
        assert waiting["application_name"] == "windlass"  # which no session of the pooler is called
        async with asyncio.timeout(5):
            await end(store)
        await reader.execute("COMMIT")

        assert await retaining == Retained(partitions=1)
        assert OVER not in await partitions(store, watcher)
    finally:
        if reader is not None:
            reader.terminate()
        await store.close()


# Workers


async def run_app(app: App, *, rounds: int) -> None:
    """Let a worker that is waiting for work complete 200 tasks, some at a time."""

    @app.task
    async def double(number: int) -> int:
        return 2 * number

    each = TASKS // rounds
    async with app.worker():
        for start in range(0, TASKS, each):
            numbers = range(start, start + each)
            handles = await app.enqueue_many([double.call(number) for number in numbers])
            results = await asyncio.gather(*(handle.result(20) for handle in handles))
            assert results == [2 * number for number in numbers]
            await asyncio.sleep(0.1)  # long enough to find nothing and to wait
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.fixture
def quick_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the listener try its connection often enough to be seen doing so."""
    monkeypatch.setattr(listener, "PROBE_EVERY", 0.2)


@pytest.mark.usefixtures("quick_probe")
@pytest.mark.parametrize("direct", [True, False], ids=["direct_url", "no_direct_url"])
async def test_a_worker_behind_the_pooler_completes_its_tasks_and_says_only_what_it_lacks(
    pooled_url: str,
    sql_url: str,
    direct: bool,
    caplog: pytest.LogCaptureFixture,
    watcher: asyncpg.Connection,
) -> None:
    # Without a direct URL nobody is told of new work: polling has to find it.
    caplog.set_level(logging.INFO)
    direct_url = sql_url if direct else None
    app = App(pooled_url, pooler=True, direct_url=direct_url, poll=0.2, sweep=0.2)

    async with asyncio.timeout(60):
        await run_app(app, rounds=4)

    complaints = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    if not direct:
        assert "set direct_url" in complaints.pop()
    assert complaints == []
    counts = await watcher.fetch("SELECT status, count(*) FROM windlass.tasks GROUP BY status")
    assert [tuple(row) for row in counts] == [("completed", TASKS)]
    assert await watcher.fetchval("SELECT count(*) FROM windlass.worker") == 0
