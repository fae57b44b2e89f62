"""What the server is told of a leader's write, so that it ends with the term whatever became of it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import timedelta

import asyncpg
import pytest

from contract.postgres_clock import PostgresClock
from contract.postgres_keeper import NOON
from contract.postgres_sessions import DEADLINE, OTHER_WORKER, TERM, WORKER, lead, worker_info
from windlass.model.errors import StoreUnavailable
from windlass.model.task import Leadership
from windlass.store.postgres.store import PostgresStore

LIMITS = ("statement_timeout", "idle_in_transaction_session_timeout", "transaction_timeout")
SHORT_TERM = timedelta(seconds=0.5)
MILLISECONDS = "SELECT setting FROM pg_settings WHERE name = $1"


@pytest.fixture
async def clock(sql_url: str) -> AsyncIterator[PostgresClock]:
    clock = await PostgresClock.install(sql_url)
    yield clock
    await clock.close()


async def known_limits(connection: asyncpg.Connection) -> list[str]:
    """Servers before 17 have no limit for a whole transaction."""
    is_known = "SELECT EXISTS (SELECT FROM pg_settings WHERE name = $1)"
    return [limit for limit in LIMITS if await connection.fetchval(is_known, limit)]


async def test_statements_pauses_and_the_whole_write_are_limited_to_what_remains_of_the_term(
    store: PostgresStore, clock: PostgresClock
) -> None:
    await clock.freeze(NOON)
    leadership = await lead(store)
    await clock.freeze(NOON + timedelta(seconds=4))

    async with store._led(leadership) as connection:
        known = await known_limits(connection)
        limits = {limit: await connection.fetchval(MILLISECONDS, limit) for limit in known}

        assert ("transaction_timeout" in known) == (connection.get_server_version().major >= 17)
    assert limits == dict.fromkeys(known, "11000")


async def test_the_limits_of_a_write_go_with_it(store: PostgresStore) -> None:
    async with store._run._connection() as connection:
        known = await known_limits(connection)
        before = [await connection.fetchval(MILLISECONDS, limit) for limit in known]
    await store.rescue(1, leadership=await lead(store))

    async with store._run._connection() as connection:
        assert [await connection.fetchval(MILLISECONDS, limit) for limit in known] == before


@pytest.mark.parametrize("limit", LIMITS)
async def test_each_limit_by_itself_lets_the_next_leader_in_when_the_term_is_over(
    store: PostgresStore, limit: str
) -> None:
    async with store._run.transaction() as connection:
        if limit not in await known_limits(connection):
            pytest.skip("servers before 17 have no such limit")
    leadership = await store.lead(WORKER, current=None, term=SHORT_TERM)
    assert leadership is not None
    writing = asyncio.create_task(hang(store, leadership, limit))
    won = None
    try:
        async with asyncio.timeout(DEADLINE):
            while won is None:
                won = await store.lead(OTHER_WORKER, current=None, term=TERM)
    finally:
        writing.cancel()
        with suppress(asyncio.CancelledError, StoreUnavailable):
            await writing

    assert won == Leadership(OTHER_WORKER, leadership.term + 1)


async def hang(store: PostgresStore, leadership: Leadership, limit: str) -> None:
    """Write as a leader, without the other limits, in a way that this one has to end."""
    async with store._led(leadership) as connection:
        for other in await known_limits(connection):
            if other != limit:
                await connection.execute(f"SET LOCAL {other} = 0")
        if limit == "statement_timeout":
            await connection.execute("SELECT pg_sleep(3600)")
        await asyncio.Event().wait()


async def test_where_nobody_works_there_is_nothing_to_do(store: PostgresStore) -> None:
    assert (await store.due())[1:] == (False, False, False, False, False, None, False)


async def test_a_worker_that_lives_is_not_looked_for(
    store: PostgresStore, clock: PostgresClock
) -> None:
    await clock.freeze(NOON)
    await store.register(worker_info(), lease=timedelta(seconds=30))
    lives = await store.due()
    await clock.freeze(NOON - timedelta(seconds=1))
    set_back = await store.due()
    await clock.freeze(NOON + timedelta(seconds=31))
    silent = await store.due()

    assert [look.silent_workers for look in (lives, set_back, silent)] == [False, True, True]
