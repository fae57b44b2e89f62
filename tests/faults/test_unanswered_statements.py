"""A statement that nobody answers ends in a minute, and a transaction that nobody goes on with sooner."""

import asyncio
import gc
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from contract.pgbouncer import store_options
from faults.messages import COMMIT
from faults.proxy import Effect, Point, Proxy, after, before
from windlass import App, StoreUnavailable
from windlass.client import verbs
from windlass.model.task import Enqueued, NewTask
from windlass.store.postgres import connection as connection_module
from windlass.store.postgres import enqueueing, statements
from windlass.store.postgres.store import PostgresStore

DEADLINE = 30.0  # seconds until a test gives up: half of what a session may idle by default
COUNT = "SELECT count(*) FROM windlass.task"


@pytest.fixture
async def store(
    proxy: Proxy, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[PostgresStore]:
    """A store behind the proxy that waits for answers as long as any, only shorter."""
    monkeypatch.setattr(connection_module, "ANSWER_WITHIN", 1.0)
    monkeypatch.setattr(connection_module, "GIVE_UP_AFTER", 0.05)
    monkeypatch.setattr(statements, "GIVE_UP_AFTER", 0.05)
    proxy.pass_cancellations = False
    store = PostgresStore(store_options(proxy.url(database_url), pool_size=5))
    await store.open()
    yield store
    await store.close()


def new_task(number: int, **options: Any) -> NewTask:
    return NewTask(id=UUID(int=number), type="resize", payload="{}", **options)


def is_giving_up(task: asyncio.Task[Any]) -> bool:
    return any(word in str(task.get_coro()) for word in (".close", ".release", "_give_back"))


def test_no_statement_is_waited_for_longer_than_a_minute() -> None:
    assert connection_module.ANSWER_WITHIN <= 60


@pytest.mark.parametrize(
    ("point", "happened"), [(before("Parse"), 0), (before("Bind"), 0), (after(COMMIT), 1)], ids=str
)
async def test_an_enqueue_without_an_answer_ends_and_may_have_happened(
    store: PostgresStore, proxy: Proxy, watcher: asyncpg.Connection, point: Point, happened: int
) -> None:
    silent = proxy.at(point, Effect.HALF_OPEN, text="-- enqueue_")

    async with asyncio.timeout(DEADLINE):
        with pytest.raises(StoreUnavailable):
            await store.enqueue([new_task(7)])

    assert silent.reached.is_set()
    assert await watcher.fetchval(COUNT) == happened
    assert await store.enqueue([new_task(7)], repeated=True) == [Enqueued(UUID(int=7), True)]
    assert await watcher.fetchval(COUNT) == 1


async def test_a_commit_without_an_answer_ends_and_may_have_happened(
    store: PostgresStore,
    proxy: Proxy,
    watcher: asyncpg.Connection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await store.enqueue([new_task(0)])  # a new connection may begin with a transaction of its own
    monkeypatch.setattr(enqueueing, "ENQUEUE_CHUNK", 1)
    proxy.at(after("Query"), Effect.HALF_OPEN, text="COMMIT")

    async with asyncio.timeout(DEADLINE):
        with pytest.raises(StoreUnavailable):
            await store.enqueue([new_task(1), new_task(2)])

    assert await watcher.fetchval(COUNT) == 3


@pytest.mark.usefixtures("store")
async def test_a_caller_who_was_not_answered_is_told_so_and_asks_again_by_its_key(
    proxy: Proxy, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verbs, "REPEAT_WITHIN", 0.1)  # and so shorter than it waits for an answer

    async with App(proxy.url(database_url)) as app, asyncio.timeout(DEADLINE):

        @app.task
        async def resize() -> None: ...

        order = resize.options(idempotency_key="order-1")
        proxy.at(after(COMMIT), Effect.HALF_OPEN, text="-- enqueue_")
        with pytest.raises(StoreUnavailable):
            await order.enqueue()

        assert not (await order.enqueue()).created


def test_an_enqueue_is_not_repeated_when_its_answer_was_waited_for_in_vain() -> None:
    assert verbs.REPEAT_WITHIN < connection_module.ANSWER_WITHIN


async def test_when_all_connections_fell_silent_one_call_finds_it_out_for_all(
    store: PostgresStore, proxy: Proxy
) -> None:
    await asyncio.gather(*(store.enqueue([new_task(number)]) for number in range(5)))
    assert proxy.half_open_all() >= 5

    async with asyncio.timeout(DEADLINE):
        with pytest.raises(StoreUnavailable):
            await store.enqueue([new_task(7)])

        assert await store.enqueue([new_task(8)]) == [Enqueued(UUID(int=8), True)]


async def test_connections_that_were_given_up_leave_no_complaint_behind(
    store: PostgresStore, proxy: Proxy
) -> None:
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, said: complaints.append(said))
    await asyncio.gather(*(store.enqueue([new_task(number)]) for number in range(5)))
    silent = proxy.at(before("Parse"), Effect.HALF_OPEN, text="-- read_clock")
    proxy.half_open_all()

    async with asyncio.timeout(DEADLINE):
        with pytest.raises(StoreUnavailable):
            await store.enqueue([new_task(7)])
        calling = asyncio.create_task(store.now())
        await silent.reached.wait()
        while not calling.done():  # in the call, and while its connection is given back
            calling.cancel()
            await asyncio.sleep(0.01)
        while ending := [task for task in asyncio.all_tasks() if is_giving_up(task)]:
            await asyncio.wait(ending)
    del ending, calling
    gc.collect()

    assert complaints == []


async def test_who_stops_between_two_statements_keeps_no_lock_for_long(
    proxy: Proxy, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call of two statements is stopped in its tracks once it has the key of another call."""
    monkeypatch.setattr(enqueueing, "ENQUEUE_CHUNK", 1)
    proxy.pass_cancellations = False
    stopped = PostgresStore(store_options(proxy.url(database_url)))
    other = PostgresStore(store_options(database_url))
    await stopped.open()
    await other.open()
    held = proxy.at(before("Parse"), Effect.STALL, text="-- enqueue_")
    key = {"idempotency_key": "order-1"}
    stopping = asyncio.create_task(stopped.enqueue([new_task(1, **key), new_task(2)]))
    async with asyncio.timeout(DEADLINE):
        await held.reached.wait()

        assert await other.enqueue([new_task(3, **key)]) == [Enqueued(UUID(int=3), True)]

    held.release()
    with pytest.raises(StoreUnavailable):
        await stopping
    await stopped.close()
    await other.close()
