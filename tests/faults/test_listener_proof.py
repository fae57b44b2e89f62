"""A listener believes only what it has heard itself, in the session it listens in."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import pytest

from contract.postgres_sessions import LEASE, WORKER, add, worker_info
from faults.proxy import Effect, Point, Proxy, before, reply
from faults.said import DEADLINE, Said
from windlass.service import stop_task
from windlass.store.postgres import connection as connection_module
from windlass.store.postgres import listener
from windlass.store.postgres.dial import Route
from windlass.store.postgres.store import PostgresOptions, PostgresStore

EVENTS = "listener."


@asynccontextmanager
async def listening(url: str, direct_url: str | None) -> AsyncIterator[None]:
    """An idle worker that listens, and at the end is woken by a task if it listens still."""
    store = PostgresStore(PostgresOptions(url=url, direct_url=direct_url))
    await store.open()
    await store.register(worker_info(), lease=LEASE)
    await store.set_idle(WORKER, idle=True)
    woken = asyncio.Event()
    try:
        async with store.listen(lambda *_: woken.set()):
            yield
            woken.clear()
            await add(store)
            await asyncio.wait_for(woken.wait(), DEADLINE)
    finally:
        await store.close()


@pytest.mark.usefixtures("impatient")
async def test_another_session_that_answers_is_noticed_even_if_it_listens_too(
    sql_url: str, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind a pooler in which another listener has left its LISTEN."""
    other = await asyncpg.connect(sql_url)
    await other.execute('LISTEN "windlass.wake"')

    async def connect_to_two(route: Route) -> asyncpg.Connection:
        monkeypatch.setattr(listener, "connect", connection_module.connect)
        own = await connection_module.connect(route)
        ask_own = own.fetchrow

        async def ask_own_then_other(*arguments: Any, **options: Any) -> Any:
            own.fetchrow = other.fetchrow
            return await ask_own(*arguments, **options)

        own.fetchrow = ask_own_then_other
        return own

    monkeypatch.setattr(listener, "connect", connect_to_two)
    async with listening(sql_url, None):
        await said.until("listener.repaired")

    assert said.events(EVENTS) == ["listener.lost", "listener.repaired"]
    await other.close()


@pytest.mark.usefixtures("impatient")
async def test_the_word_of_another_proves_nothing(
    sql_url: str, empty_sql_url: str, said: Said
) -> None:
    """It listens in another database, where somebody else listens as well."""
    other = await asyncpg.connect(empty_sql_url)

    async def talk() -> None:
        while True:
            await other.execute("SELECT pg_notify('windlass.echo', 'a word')")
            await asyncio.sleep(0.01)

    talking = asyncio.create_task(talk())
    store = PostgresStore(PostgresOptions(url=sql_url, direct_url=empty_sql_url))
    await store.open()
    async with store.listen(lambda *_: None):
        await said.until("listener.deaf")
    await store.close()
    await stop_task(talking)
    await other.close()


@pytest.mark.usefixtures("impatient")
async def test_a_session_that_ends_before_it_has_heard_is_no_pooler(
    sql_url: str, direct_proxy: Proxy, said: Said
) -> None:
    direct_proxy.at(reply("NotificationResponse"), Effect.CUT)

    async with listening(sql_url, direct_proxy.url(sql_url)):
        await said.until("listener.repaired")

    assert said.events(EVENTS) == ["listener.lost", "listener.repaired"]


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("point", "text"), [(before("Startup"), ""), (before("Parse"), "LISTEN")], ids=str
)
async def test_a_connection_that_falls_silent_before_it_listens_is_given_up(
    sql_url: str, direct_proxy: Proxy, said: Said, point: Point, text: str
) -> None:
    direct_proxy.at(point, Effect.HALF_OPEN, text=text)

    async with listening(sql_url, direct_proxy.url(sql_url)):
        await said.until("listener.repaired")

    assert said.events(EVENTS) == ["listener.lost", "listener.repaired"]


@pytest.mark.usefixtures("impatient")
async def test_a_connection_that_has_held_for_a_while_is_replaced_as_soon_as_the_first(
    sql_url: str, direct_proxy: Proxy, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures: list[int] = []

    def backoff(number: int, *, longest: float) -> float:
        failures.append(number)
        return 0.0

    monkeypatch.setattr(listener, "backoff", backoff)
    async with listening(sql_url, direct_proxy.url(sql_url)):
        for outage in (1, 2, 3):
            held = direct_proxy.at(before("Execute", 3), Effect.DELAY, text="-- probe")
            await asyncio.wait_for(held.reached.wait(), DEADLINE)
            direct_proxy.cut_all()
            await said.until("listener.repaired", outage)

    assert failures == [1, 1, 1]


@pytest.mark.usefixtures("impatient")
async def test_what_somebody_has_to_mend_is_tried_less_often(
    sql_url: str, empty_sql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "LONGEST_UNTIL_MENDED", 0.2)
    asked: asyncio.Queue[float] = asyncio.Queue()

    def backoff(_: int, *, longest: float) -> float:
        asked.put_nowait(longest)
        return 0.0

    monkeypatch.setattr(listener, "backoff", backoff)
    store = PostgresStore(PostgresOptions(url=sql_url, direct_url=empty_sql_url))
    await store.open()
    async with store.listen(lambda *_: None):
        assert await asyncio.wait_for(asked.get(), DEADLINE) == listener.LONGEST_UNTIL_MENDED
    await store.close()
