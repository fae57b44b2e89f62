"""A breaker's row that two sessions reach for."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from uuid import UUID, uuid4

import asyncpg
import pytest

from contract.pgbouncer import store_options
from contract.postgres_sessions import AT_ONCE, LEASE, WORKER, Sessions
from windlass.model.breaker import SharedBreaker
from windlass.model.errors import StoreBusy
from windlass.store.postgres.store import PostgresStore

NAME = "payments"
OTHER = UUID(int=99)
NO_TIME = timedelta(0)
HOLD = "SELECT FROM windlass.breaker FOR UPDATE"


@pytest.mark.parametrize(
    "call",
    [
        lambda store: store.open_breaker(NAME, epoch=1, recovery=LEASE),
        lambda store: store.close_breaker(NAME, epoch=1),
        lambda store: store.probe_breaker(NAME, epoch=1, holder=WORKER, lease=LEASE),
        lambda store: store.leave_breaker(NAME, holder=WORKER),
    ],
)
async def test_nobody_waits_long_for_who_holds_a_breaker(
    store: PostgresStore, sessions: Sessions, call: Callable[[PostgresStore], Awaitable[object]]
) -> None:
    await store.open_breaker(NAME, epoch=0, recovery=NO_TIME)
    await store.probe_breaker(NAME, epoch=1, holder=WORKER, lease=LEASE)
    user = await sessions.begin()
    await user.connection.execute(HOLD)

    async with asyncio.timeout(AT_ONCE):
        with pytest.raises(StoreBusy):
            await call(store)

    assert await store.breakers([NAME]) == [SharedBreaker(NAME, 1, 0.0)]
    await user.rollback()


async def test_nobody_waits_long_for_who_opens_a_breaker_first(
    store: PostgresStore, sessions: Sessions
) -> None:
    other = await sessions.begin()
    await other.store.open_breaker(NAME, epoch=0, recovery=LEASE)

    async with asyncio.timeout(AT_ONCE):
        with pytest.raises(StoreBusy):
            await store.open_breaker(NAME, epoch=0, recovery=LEASE)

    await other.rollback()


async def test_of_two_openings_at_once_one_counts(store: PostgresStore, sessions: Sessions) -> None:
    other = await sessions.begin()
    await other.store.open_breaker(NAME, epoch=0, recovery=NO_TIME)

    opening = await sessions.blocked(store.open_breaker(NAME, epoch=0, recovery=LEASE), by=other)
    await other.commit()

    assert not await opening
    assert await store.breakers([NAME]) == [SharedBreaker(NAME, 1, 0.0)]


async def test_of_two_that_ask_for_the_trials_at_once_one_is_given_them(
    store: PostgresStore, sessions: Sessions
) -> None:
    await store.open_breaker(NAME, epoch=0, recovery=NO_TIME)
    other = await sessions.begin()
    assert await other.store.probe_breaker(NAME, epoch=1, holder=WORKER, lease=LEASE)

    asking = await sessions.blocked(
        store.probe_breaker(NAME, epoch=1, holder=OTHER, lease=LEASE), by=other
    )
    await other.commit()

    assert not await asking


async def test_who_closes_it_while_another_asks_for_the_trials_ends_them(
    store: PostgresStore, sessions: Sessions
) -> None:
    await store.open_breaker(NAME, epoch=0, recovery=NO_TIME)
    other = await sessions.begin()
    assert await other.store.close_breaker(NAME, epoch=1)

    asking = await sessions.blocked(
        store.probe_breaker(NAME, epoch=1, holder=OTHER, lease=LEASE), by=other
    )
    await other.commit()

    assert not await asking


BEFORE = 22  # the number of the migration that makes the table


async def test_who_may_read_tasks_may_read_breakers(
    empty_database_url: str, empty_sql_url: str
) -> None:
    store = PostgresStore(store_options(empty_database_url))
    old = [each for each in store._sql.migrations() if each.number < BEFORE]
    session = await asyncpg.connect(empty_sql_url)
    role = f"shop_{uuid4().hex}"
    await session.execute(store.schema.script(old))
    await session.execute(f"CREATE ROLE {role}; GRANT SELECT, INSERT ON windlass.task TO {role}")

    await store.open()
    rights = [
        await session.fetchval("SELECT has_table_privilege($1, 'windlass.breaker', $2)", role, one)
        for one in ("SELECT", "INSERT")
    ]
    await store.close()
    await session.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")
    await session.close()

    assert rights == [True, False]
