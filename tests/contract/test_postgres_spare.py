"""The connection of the last call is kept at hand for the next one, and from nobody who wants it."""

import asyncio
from collections.abc import AsyncIterator

import asyncpg
import pytest

from windlass.store.postgres.statements import Statements
from windlass.store.postgres.store import PostgresOptions, PostgresStore

pytestmark = pytest.mark.needs_direct("a connection is known by its session")

SIZE = 2
SESSION = "SELECT pg_backend_pid()"


@pytest.fixture
async def store(database_url: str) -> AsyncIterator[PostgresStore]:
    store = PostgresStore(PostgresOptions(url=database_url, pool_size=SIZE))
    await store.open()
    yield store
    await store.close()


@pytest.fixture
async def user(database_url: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(database_url)
    yield connection
    await connection.close()


async def session_of(run: Statements) -> int:
    """The session that the next call uses."""
    async with run.transaction() as connection:
        return int(await connection.fetchval(SESSION))


async def test_one_call_after_the_other_uses_one_session_and_leaves_the_pool_alone(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await session_of(store._run)
    monkeypatch.setattr(asyncpg.Pool, "acquire", None)
    monkeypatch.setattr(asyncpg.Pool, "release", None)

    assert [await session_of(store._run) for _ in range(3)] == [first] * 3


async def test_whoever_waits_for_a_connection_is_given_the_first_that_comes_free(
    store: PostgresStore,
) -> None:
    """One that were kept beside the pool would never come."""
    async with asyncio.timeout(20), store._run.transaction():  # and does not end meanwhile
        async with store._run.transaction() as connection:
            second = await connection.fetchval(SESSION)
            waiting = asyncio.create_task(session_of(store._run))
            while not store._run._waiting:
                await asyncio.sleep(0)

        assert await waiting == second


async def test_of_connections_that_come_free_together_one_is_kept_and_none_is_lost(
    store: PostgresStore,
) -> None:
    for _ in range(3):
        async with (
            asyncio.timeout(20),
            store._run.transaction() as one,
            store._run.transaction() as other,
        ):
            assert await one.fetchval(SESSION) != await other.fetchval(SESSION)


async def test_who_borrows_a_connection_is_given_the_one_that_is_kept(store: PostgresStore) -> None:
    kept = await session_of(store._run)
    async with store._run.lend() as borrowed:
        assert await borrowed.fetchval(SESSION) == kept
        assert await session_of(store._run) != kept


async def test_a_connection_whose_session_ended_meanwhile_is_not_used(
    store: PostgresStore, user: asyncpg.Connection
) -> None:
    kept = await session_of(store._run)
    await user.execute("SELECT pg_terminate_backend($1, 10000)", kept)
    pool = store._run.pool
    assert pool is not None
    async with asyncio.timeout(20):
        while pool.get_size():  # the driver has not heard of it yet
            await asyncio.sleep(0.001)

    assert await session_of(store._run) != kept


async def test_connections_that_are_not_to_be_used_any_more_are_not_kept(
    store: PostgresStore,
) -> None:
    kept = await session_of(store._run)
    await store._run.expire()
    another = await session_of(store._run)
    async with store._run.transaction() as connection:
        under_way = await connection.fetchval(SESSION)
        await store._run.expire()

    assert another != kept
    assert under_way == another
    assert await session_of(store._run) != under_way


async def test_the_only_connection_of_a_pool_is_not_kept_from_it(database_url: str) -> None:
    single = PostgresStore(PostgresOptions(url=database_url, pool_size=1))
    await single.open()
    try:
        kept = await session_of(single._run)
        assert single._run.pool is not None
        async with asyncio.timeout(20):
            assert await single._run.pool.fetchval(SESSION) == kept
    finally:
        await single.close()


async def test_a_store_that_is_closed_leaves_no_session_behind(
    store: PostgresStore, user: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = await session_of(store._run)
    monkeypatch.setattr(asyncpg.Pool, "terminate", None)  # there is nothing to cut off
    await store.close()

    async with asyncio.timeout(20):
        while await user.fetchval("SELECT count(*) FROM pg_stat_activity WHERE pid = $1", kept):
            await asyncio.sleep(0.005)


async def test_a_call_that_ends_after_the_store_was_closed_keeps_nothing(
    store: PostgresStore,
) -> None:
    async with store._run.transaction():
        closing = asyncio.create_task(store.close())
        while store._run.pool is not None:
            await asyncio.sleep(0)
    await closing

    assert store._run._spare is None
