"""One leader at a time: in crowded elections, and beside one that vanished, hangs or came back."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import timedelta
from uuid import UUID

import asyncpg
import pytest

from contract.pgbouncer import store_options
from faults.proxy import Effect, Proxy, before
from faults.scene import worker_info
from windlass.maintenance.chores import Chore
from windlass.maintenance.leader import Leader
from windlass.model.errors import NotLeader, StoreUnavailable
from windlass.model.task import Leadership, NewTask
from windlass.service import Stop
from windlass.store.clock_watch import ClockWatch
from windlass.store.postgres.store import PostgresStore

ELECTIONS = 200
CANDIDATES = [UUID(int=number) for number in range(1, 9)]
TERM = timedelta(seconds=15)
DEADLINE = 30.0  # seconds until a test gives up: half of what a session may idle by default


@pytest.fixture
async def stores(database_url: str) -> AsyncIterator[list[PostgresStore]]:
    """A store for each candidate, as in a process of its own."""
    async with AsyncExitStack() as stack:
        stores = []
        for _ in CANDIDATES:
            store = PostgresStore(store_options(database_url, pool_size=2))
            await store.open()
            stack.push_async_callback(store.close)
            stores.append(store)
        yield stores


async def test_of_eight_candidates_at_once_one_is_elected_two_hundred_times(
    stores: list[PostgresStore], watcher: asyncpg.Connection
) -> None:
    terms: list[int] = []
    for election in range(ELECTIONS):
        answers = await asyncio.gather(
            *(
                store.lead(candidate, current=None, term=TERM)
                for store, candidate in zip(stores, CANDIDATES, strict=True)
            )
        )
        winners = [answer for answer in answers if answer is not None]
        assert len(winners) == 1, winners
        terms.append(winners[0].term)
        if election % 2:
            await stores[0].resign(winners[0])
        else:  # it vanished, and its term is over
            await watcher.execute("UPDATE windlass.leadership SET expires_at = '-infinity'")

    assert terms == sorted(set(terms))


@pytest.mark.parametrize("last_seen", ["in a statement", "between two statements"])
async def test_a_leader_that_vanished_in_mid_write_is_replaced_at_the_end_of_its_term(
    stores: list[PostgresStore], watcher: asyncpg.Connection, last_seen: str
) -> None:
    vanished, other = stores[:2]
    term = timedelta(seconds=1)
    held = await vanished.lead(CANDIDATES[0], current=None, term=term)
    assert held is not None
    await other.enqueue([NewTask(id=UUID(int=7), type="resize", payload="{}", delay=3600)])

    async def write_late() -> None:
        async with vanished._led(held) as connection:
            # Nothing more is heard of it: it has the seat locked, and a write under way.
            await connection.execute("DELETE FROM windlass.scheduled")
            if last_seen == "in a statement":
                await connection.execute("SELECT pg_sleep(3600)")
            await elected.wait()

    elected = asyncio.Event()
    writing = asyncio.create_task(write_late())
    async with asyncio.timeout(DEADLINE):
        won = None
        while won is None:
            won = await other.lead(CANDIDATES[1], current=None, term=TERM)
    elected.set()

    assert won.term == held.term + 1
    with pytest.raises(StoreUnavailable):
        await writing
    with pytest.raises(NotLeader):
        await vanished.promote(1, leadership=held)
    assert await watcher.fetchval("SELECT count(*) FROM windlass.scheduled") == 1


async def test_a_leader_whose_chore_waits_for_a_lock_hands_over_and_can_write_nothing_more(
    stores: list[PostgresStore], watcher: asyncpg.Connection
) -> None:
    """Its chore hangs in the database, behind a lock that somebody holds."""
    terms: list[tuple[UUID, int]] = []
    stop = Stop()
    changed = asyncio.Event()

    def candidate(store: PostgresStore, me: UUID) -> Leader:
        async def remove(leadership: Leadership) -> bool:
            if (me, leadership.term) not in terms:
                terms.append((me, leadership.term))
                changed.set()
            await store.tidy(leadership=leadership)
            return False

        return Leader(
            store=store,
            candidate=me,
            term=timedelta(seconds=0.6),
            clock=ClockWatch(lease=TERM, heartbeat=TERM / 3),
            chores=[Chore("tidy", 0.01, remove)],
        )

    holding = watcher.transaction()
    await holding.start()
    await watcher.execute("LOCK TABLE windlass.cancel_request IN ACCESS EXCLUSIVE MODE")
    leaders = [candidate(store, me) for store, me in zip(stores[:2], CANDIDATES[:2], strict=True)]
    running = [asyncio.create_task(leader.run(stop)) for leader in leaders]
    async with asyncio.timeout(DEADLINE):
        while len({me for me, _ in terms}) < 2:
            changed.clear()
            await changed.wait()
    await holding.rollback()
    stop.set()
    await asyncio.gather(*running)

    numbers = [term for _, term in terms]
    assert numbers == sorted(set(numbers))


async def test_the_write_of_a_leader_that_was_deposed_meanwhile_changes_nothing(
    stores: list[PostgresStore], watcher: asyncpg.Connection
) -> None:
    """Two leaders on purpose: the second one is made by hand while the first is at work."""
    old, new = stores[:2]
    held = await old.lead(CANDIDATES[0], current=None, term=TERM)
    assert held is not None
    await old.enqueue([NewTask(id=UUID(int=7), type="resize", payload="{}", delay=3600)])
    await watcher.execute(
        "UPDATE windlass.scheduled SET due = clock_timestamp() - interval '1 minute'"
    )
    await watcher.execute(
        "UPDATE windlass.leadership SET holder = $1, term = term + 1", CANDIDATES[1]
    )

    for write in (
        old.promote(10, leadership=held),
        old.rescue(10, leadership=held),
        old.tidy(leadership=held),
        old.remove_dead_workers(leadership=held),
        old.prepare_history(leadership=held),
        old.retain(leadership=held),
    ):
        with pytest.raises(NotLeader):
            await write
    assert await old.lead(CANDIDATES[0], current=held, term=TERM) is None
    await old.resign(held)  # of a seat that is not its own any more

    assert await watcher.fetchval("SELECT count(*) FROM windlass.scheduled") == 1
    assert await new.promote(10, leadership=Leadership(CANDIDATES[1], held.term + 1)) == 1


@pytest.mark.parametrize("statement", ["-- assert_leader", "-- promote_due"])
async def test_the_write_of_a_leader_that_was_cut_off_arrives_too_late_and_changes_nothing(
    stores: list[PostgresStore],
    watcher: asyncpg.Connection,
    proxy: Proxy,
    database_url: str,
    caplog: pytest.LogCaptureFixture,
    statement: str,
) -> None:
    """Its statement is held up on the way, before or after the seat was locked for it."""
    term, stop = timedelta(seconds=0.9), Stop()
    await stores[0].enqueue([NewTask(id=UUID(int=7), type="resize", payload="{}", delay=3600)])
    await watcher.execute("UPDATE windlass.scheduled SET due = clock_timestamp()")
    proxy.pass_cancellations = False
    cut_off = PostgresStore(store_options(proxy.url(database_url), auto_migrate=False))
    await cut_off.open()

    async def promote(leadership: Leadership) -> bool:
        return await cut_off.promote(10, leadership=leadership) > 0

    stalled = proxy.at(before("Bind"), Effect.STALL, text=statement)
    leader = Leader(
        store=cut_off,
        candidate=CANDIDATES[0],
        term=term,
        clock=ClockWatch(lease=TERM, heartbeat=TERM / 3),
        chores=[Chore("x", 0.01, promote)],
    )
    await stores[1].register(worker_info(CANDIDATES[1]), lease=TERM)
    leading = asyncio.create_task(leader.run(stop))
    async with asyncio.timeout(DEADLINE):
        await stalled.reached.wait()
        proxy.pause()
        won = None
        while won is None:
            won = await stores[1].lead(CANDIDATES[1], current=None, term=TERM)
        stalled.release()
        proxy.resume()
        while leader._held is not None:  # it hears that it was deposed
            await asyncio.sleep(0.02)
    stop.set()
    await leading
    await cut_off.close()

    assert won.term == 2
    assert await watcher.fetchval("SELECT count(*) FROM windlass.scheduled") == 1
    assert await stores[1].promote(10, leadership=won) == 1
    assert "chore.failed" not in caplog.text
