"""Elections, and the writes of leaders that were deposed."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest

from contract.postgres_sessions import (
    AT_ONCE,
    DAY,
    LEASE,
    OTHER_WORKER,
    TERM,
    WORKER,
    Sessions,
    add,
    claim,
    lead,
    worker_info,
)
from windlass.model.errors import (
    NotLeader,
    StoreUnavailable,
)
from windlass.model.task import (
    Leadership,
)
from windlass.store.postgres.store import PostgresStore

SHORT_TERM = timedelta(seconds=0.5)


async def test_an_election_waits_for_the_leaders_write_and_deposes_it(
    store: PostgresStore, sessions: Sessions
) -> None:
    leadership = await lead(store, WORKER)
    due, later = await add(store, 1, delay=60.0), await add(store, 1, delay=90.0)
    await sessions.advance(timedelta(seconds=61))
    renewed = await store.lead(WORKER, current=leadership, term=TERM)
    assert renewed is not None
    leading = await sessions.begin()
    assert await leading.store.promote(100, leadership=renewed) == 1
    await sessions.advance(timedelta(seconds=91))

    electing = await sessions.blocked(store.lead(OTHER_WORKER, current=None, term=TERM), by=leading)
    await leading.commit()

    won = await electing
    assert won == Leadership(OTHER_WORKER, renewed.term + 1)
    with pytest.raises(NotLeader):
        await store.promote(100, leadership=renewed)
    assert await sessions.places(due[0]) == ["ready"]
    assert await sessions.places(later[0]) == ["scheduled"]


CHORES: dict[str, Callable[[PostgresStore, Leadership], Awaitable[Any]]] = {
    "promote": lambda store, shown: store.promote(100, leadership=shown),
    "rescue": lambda store, shown: store.rescue(100, leadership=shown),
    "remove_dead_workers": lambda store, shown: store.remove_dead_workers(leadership=shown),
    "tidy": lambda store, shown: store.tidy(leadership=shown),
    "prepare_history": lambda store, shown: store.prepare_history(leadership=shown),
    "retain": lambda store, shown: store.retain(leadership=shown),
}


@pytest.mark.parametrize("chore", CHORES)
async def test_a_leaders_write_that_waits_for_an_election_changes_nothing(
    store: PostgresStore, sessions: Sessions, chore: str
) -> None:
    await add(store)
    await claim(store)  # to be rescued
    await add(store, delay=1.0)  # to be promoted
    await store.register(worker_info(UUID(int=3)), lease=LEASE)  # to be removed
    await sessions.advance(20 * DAY)  # to be prepared and retained
    leadership = await lead(store, WORKER)
    electing = await sessions.begin()
    await electing.store.resign(leadership)
    assert await electing.store.lead(OTHER_WORKER, current=None, term=TERM) is not None
    before = await contents(sessions)

    writing = await sessions.blocked(CHORES[chore](store, leadership), by=electing)
    await electing.commit()

    with pytest.raises(NotLeader):
        await writing
    assert await contents(sessions) == before


async def contents(sessions: Sessions) -> list[int]:
    tables = ("claim", "scheduled", "ready", "worker", "lane", "history")
    counts = [f"(SELECT count(*) FROM windlass.{table})" for table in tables]
    counts.append("(SELECT count(*) FROM pg_inherits)")
    return list(await sessions.watcher.fetchrow(f"SELECT {', '.join(counts)}"))


@pytest.mark.parametrize("undone", [False, True])
async def test_of_two_candidates_one_is_elected(
    store: PostgresStore, sessions: Sessions, undone: bool
) -> None:
    first = await sessions.begin()
    won = await first.store.lead(WORKER, current=None, term=TERM)
    assert won is not None

    second = await sessions.blocked(store.lead(OTHER_WORKER, current=None, term=TERM), by=first)
    await (first.rollback() if undone else first.commit())

    assert await second == (Leadership(OTHER_WORKER, won.term) if undone else None)


async def test_leaders_writes_do_not_wait_for_each_other(
    store: PostgresStore, sessions: Sessions
) -> None:
    leadership = await lead(store)
    leading = await sessions.begin()
    await leading.store.promote(100, leadership=leadership)

    async with asyncio.timeout(AT_ONCE):
        await store.rescue(100, leadership=leadership)


async def test_a_leader_that_falls_silent_in_its_write_is_replaced_after_its_term(
    store: PostgresStore, sessions: Sessions
) -> None:
    leadership = await store.lead(WORKER, current=None, term=SHORT_TERM)
    assert leadership is not None
    stopped = await sessions.begin()
    await stopped.store.rescue(100, leadership=leadership)

    async with asyncio.timeout(AT_ONCE):
        won = await store.lead(OTHER_WORKER, current=None, term=TERM)

    assert won == Leadership(OTHER_WORKER, leadership.term + 1)


async def test_a_leaders_write_that_hangs_ends_with_its_term(
    store: PostgresStore, sessions: Sessions
) -> None:
    holder = await sessions.begin()
    await holder.connection.execute("LOCK TABLE windlass.lane")
    leadership = await store.lead(WORKER, current=None, term=SHORT_TERM)
    assert leadership is not None

    with pytest.raises(StoreUnavailable):
        async with asyncio.timeout(AT_ONCE):
            await store.tidy(leadership=leadership)


async def test_a_term_of_any_length_can_be_shown(store: PostgresStore) -> None:
    leadership = await store.lead(WORKER, current=None, term=30 * DAY)
    assert leadership is not None

    assert (await store.rescue(100, leadership=leadership)).claims == 0


async def test_who_has_resigned_is_no_leader(store: PostgresStore) -> None:
    leadership = await lead(store)
    await store.resign(leadership)

    with pytest.raises(NotLeader):
        await store.rescue(100, leadership=leadership)
