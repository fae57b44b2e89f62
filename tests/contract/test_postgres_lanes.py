"""Lanes: their lower bound while transactions commit late, stay open or are undone; their rest."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from uuid import UUID

import pytest

from contract.postgres_sessions import (
    AT_ONCE,
    WORKER,
    Sessions,
    add,
    claim,
    granted,
    lead,
    look_behind_twice,
    request,
    settlements,
)
from windlass.model.task import Leadership, Outcome, TaskState
from windlass.store.postgres import claiming
from windlass.store.postgres.cursors import Key
from windlass.store.postgres.store import PostgresStore


def bound(store: PostgresStore) -> Key:
    """Where the next claim in the only lane starts."""
    bounds, _ = store._cursors[False].begin()
    (key,) = bounds.values()
    return key


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The monotonic clock by which a store waits for an open transaction."""
    moving = SimpleNamespace(now=100.0)
    monkeypatch.setattr(claiming, "time", SimpleNamespace(monotonic=lambda: moving.now))
    return moving


async def test_a_task_whose_transaction_commits_late_is_claimed(
    store: PostgresStore, sessions: Sessions, clock: SimpleNamespace
) -> None:
    slow = await sessions.begin()
    (late,) = await add(slow.store)
    early = await add(store, 20)
    taken = await granted(store, limit=8)
    taken += await granted(store, limit=8)
    assert taken == early[:16]
    assert bound(store) < (await slow.xid(), 0)

    await slow.commit()

    assert await granted(store) == [late, *early[16:]]


async def test_a_task_whose_transaction_commits_during_a_claim_is_claimed_by_the_next(
    store: PostgresStore, sessions: Sessions
) -> None:
    slow = await sessions.begin()
    (late,) = await add(slow.store)
    early = await add(store, 3)
    pause = await sessions.pause("claim", "INSERT")

    # The lanes have been read, and the claim is not done.
    claiming = await sessions.blocked(granted(store), by=pause)
    await slow.commit()
    await pause.commit()

    assert await claiming == early
    assert await granted(store) == [late]


async def test_claims_pass_an_open_writer_and_come_back_for_its_tasks(
    store: PostgresStore, sessions: Sessions, clock: SimpleNamespace
) -> None:
    await sessions.watcher.execute("CREATE TABLE public.orders (id integer)")
    writer = await sessions.begin()
    await writer.connection.execute("INSERT INTO public.orders VALUES (1)")
    late = await add(writer.store, 3)
    xid = await writer.xid()
    early = await add(store, 40)
    taken = await granted(store, limit=10)
    assert bound(store) < (xid, 0)

    clock.now += 1.1
    taken += await granted(store, limit=10)
    passed = bound(store)
    await writer.commit()
    for _ in range(4):
        taken += await granted(store, limit=10)

    assert passed > (xid, 0)
    assert sorted(taken) == sorted(early + late)
    assert await granted(store) == []
    assert xid not in store._cursors[False].begin()[1]  # it is not asked for any more


async def test_an_open_writer_holds_the_bound_for_no_longer_than_a_second(
    store: PostgresStore, sessions: Sessions, clock: SimpleNamespace
) -> None:
    await sessions.watcher.execute("CREATE TABLE public.orders (id integer)")
    writer = await sessions.begin()
    await writer.connection.execute("INSERT INTO public.orders VALUES (1)")
    xid = await writer.xid()
    bounds = []

    for _ in range(5):
        await add(store, 10)
        assert len(await granted(store, limit=10)) == 10
        bounds.append(bound(store))
        clock.now += 0.4

    assert [key > (xid, 0) for key in bounds] == [False, False, False, True, True]


async def test_an_open_writer_that_is_undone_leaves_nothing_to_ask_for(
    store: PostgresStore, sessions: Sessions, clock: SimpleNamespace
) -> None:
    writer = await sessions.begin()
    await add(writer.store, 3)
    xid = await writer.xid()
    early = await add(store, 30)
    taken = await granted(store, limit=10)
    clock.now += 1.1
    taken += await granted(store, limit=10)

    await writer.rollback()
    for _ in range(3):
        taken += await granted(store, limit=10)

    assert taken == early
    assert xid not in store._cursors[False].begin()[1]


async def test_tasks_of_two_lanes_and_several_open_writers_are_all_claimed_once(
    store: PostgresStore, sessions: Sessions, clock: SimpleNamespace
) -> None:
    writers = [await sessions.begin() for _ in range(3)]
    expected: list[UUID] = []
    taken: list[UUID] = []
    for turn in range(4):
        for writer in writers:
            expected += await add(writer.store, 2, priority=10 + 10 * (turn % 2))
        expected += await add(store, 7, priority=10 + 10 * (turn % 2))
        taken += await granted(store, limit=5)
        clock.now += 0.6
        if turn:
            await writers.pop(turn % len(writers)).commit()
    empty = 0
    while empty < 3:  # a claim finds that a writer has ended, the next one asks for its tasks
        more = await granted(store, limit=5)
        taken += more
        empty = 0 if more else empty + 1
        clock.now += 0.6

    assert sorted(taken) == sorted(expected)


@pytest.mark.parametrize("seen_while_held", [False, True])
async def test_tasks_of_a_claim_that_was_undone_are_claimed_in_the_end(
    store: PostgresStore, sessions: Sessions, clock: SimpleNamespace, seen_while_held: bool
) -> None:
    ids = await add(store, 10)
    claiming = await sessions.begin()
    assert len((await claim(claiming.store, limit=5)).tasks) == 5
    assert await granted(store) == ids[5:]
    clock.now += 1.1  # passes whatever other tests have open in other databases
    assert await granted(store) == []
    if seen_while_held:
        await look_behind_twice(store)
        assert await granted(store) == []

    await claiming.rollback()
    assert await granted(store) == []
    await look_behind_twice(store)

    assert await granted(store) == ids[:5]


async def test_a_worker_that_starts_reads_from_the_beginning(
    store: PostgresStore, sessions: Sessions
) -> None:
    ids = await add(store, 4)
    claiming = await sessions.begin()
    await claim(claiming.store, limit=2)
    assert await granted(store) == ids[2:]
    await claiming.rollback()

    other = await sessions.open_store()

    assert await granted(other) == ids[:2]


async def test_a_claim_whose_answer_was_lost_reads_from_the_beginning(
    store: PostgresStore, sessions: Sessions
) -> None:
    ids = await add(store, 4)
    claiming = await sessions.begin()
    await claim(claiming.store, limit=2)
    assert await granted(store) == ids[2:]
    await claiming.rollback()
    ids += await add(store)
    pause = await sessions.pause("claim", "INSERT")

    losing = await sessions.blocked(store.claim(request()), by=pause)
    losing.cancel()
    await asyncio.gather(losing, return_exceptions=True)
    await pause.commit()

    assert await granted(store) == [*ids[:2], ids[4]]


async def test_two_claims_at_once_share_a_lane_without_waiting(
    store: PostgresStore, sessions: Sessions
) -> None:
    ids = await add(store, 10)
    claiming = await sessions.begin()
    first = await claim(claiming.store, limit=4)

    async with asyncio.timeout(AT_ONCE):
        second = await granted(store, limit=10)
    await claiming.commit()

    assert [task.id for task in first.tasks] + second == ids


# Lanes that rest


LISTED = "SELECT count(*) FROM windlass.lane"
RESTING = "SELECT count(*) FROM windlass.resting_lane"


async def tidy_hours_later(store: PostgresStore, sessions: Sessions, hours: int = 2) -> None:
    """Move the clock past the moment at which an empty lane is retired, and tidy."""
    await sessions.advance(timedelta(hours=hours))
    await store.tidy(leadership=await lead(store))


async def test_an_empty_lane_is_retired_and_the_next_task_lists_it_again(
    store: PostgresStore, sessions: Sessions
) -> None:
    await add(store)
    await granted(store)
    await tidy_hours_later(store, sessions)
    assert await sessions.watcher.fetchval(LISTED) == 0
    assert await granted(store) == []

    again = await add(store)

    assert await granted(store) == again
    await store.tidy(leadership=Leadership(WORKER, 1))
    assert await sessions.watcher.fetchval(LISTED) == 1


async def test_a_lane_with_a_task_and_a_lane_that_is_new_are_not_retired(
    store: PostgresStore, sessions: Sessions
) -> None:
    waiting = await add(store, type="old")
    await sessions.advance(timedelta(hours=2))
    await add(store, type="new")
    await granted(store, of="new")

    await store.tidy(leadership=await lead(store))

    assert await sessions.watcher.fetchval(RESTING) == 0
    assert await granted(store, of="old") == waiting


@pytest.mark.parametrize("isolation", ["read committed", "repeatable read"])
async def test_a_task_of_a_transaction_that_saw_its_lane_before_it_was_retired_is_found(
    store: PostgresStore, sessions: Sessions, isolation: str
) -> None:
    await add(store)
    await granted(store)
    producer = await sessions.begin(isolation)
    counting_on_the_lane = await add(producer.store)
    await tidy_hours_later(store, sessions)
    await producer.commit()
    assert await sessions.watcher.fetchval(LISTED) == 0

    assert await store.tidy(leadership=Leadership(WORKER, 1)) > 0

    assert await granted(store) == counting_on_the_lane


@pytest.mark.parametrize(
    "ways_back",
    [
        (Outcome.RETRIED, Outcome.RETRIED),
        (Outcome.RELEASED, Outcome.RELEASED),
        (Outcome.RELEASED, None),
    ],
)
async def test_a_task_that_comes_back_lists_its_lane_again(
    store: PostgresStore, sessions: Sessions, ways_back: Sequence[Outcome | None]
) -> None:
    (task_id,) = await add(store)
    for turn, come_back in enumerate(ways_back, start=1):  # the first may make a new lane
        held = await claim(store)
        assert [task.id for task in held.tasks] == [task_id]
        await tidy_hours_later(store, sessions, hours=2 * turn)
        assert await sessions.watcher.fetchval(LISTED) == 0

        if come_back is None:
            await store.rescue(10)
        else:
            await store.settle(settlements(held, come_back))

    assert await granted(store) == [task_id]


async def test_a_task_whose_time_comes_lists_its_lane_again(
    store: PostgresStore, sessions: Sessions
) -> None:
    later = await add(store, delay=3 * 3600.0)
    await tidy_hours_later(store, sessions)
    assert await sessions.watcher.fetchval(LISTED) == 0
    await sessions.advance(timedelta(hours=4))

    assert await store.promote(10) == 1

    assert await granted(store) == later


async def test_a_scheduled_task_of_a_lane_that_rests_is_counted_in_its_queue(
    store: PostgresStore, sessions: Sessions
) -> None:
    await add(store, delay=3 * 3600.0)
    await tidy_hours_later(store, sessions)
    assert await sessions.watcher.fetchval(LISTED) == 0

    (queue,) = await store.queues()

    assert queue.counts == {TaskState.SCHEDULED: 1}


async def test_a_lane_that_somebody_holds_keeps_nobody_from_tidying(
    store: PostgresStore, sessions: Sessions
) -> None:
    await add(store, type="held")
    await add(store, type="free")
    for of in ("held", "free"):
        await granted(store, of=of)
    user = await sessions.begin()
    await user.connection.execute("SELECT FROM windlass.lane WHERE type = 'held' FOR UPDATE")

    async with asyncio.timeout(AT_ONCE):
        await tidy_hours_later(store, sessions)

    rows = await sessions.watcher.fetch("SELECT type FROM windlass.lane")
    assert [row["type"] for row in rows] == ["held"]


async def test_a_reader_forgets_a_lane_that_rests(store: PostgresStore, sessions: Sessions) -> None:
    await add(store)
    await granted(store)
    await granted(store)
    assert len(store._cursors[False].begin()[0]) == 1

    await tidy_hours_later(store, sessions)

    assert await granted(store) == []
    assert store._cursors[False].begin() == ({}, [])


async def test_who_claims_other_types_apart_leaves_the_bounds_of_the_others_as_they_are(
    store: PostgresStore,
) -> None:
    await add(store, 2)
    await add(store, 2, type="shrink")
    apart = replace(request(of="shrink"), apart=True)
    await claim(store)
    await store.claim(apart)
    before = dict(store._cursors[False].bounds)

    assert (await store.claim(apart)).claim is None

    assert store._cursors[False].bounds == before
    assert set(store._cursors_apart[False].bounds).isdisjoint(before)


async def test_what_a_claim_apart_has_skipped_is_found_behind_its_bounds(
    store: PostgresStore, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claiming, "LOOK_BEHIND_EVERY", 0.01)
    monkeypatch.setattr(claiming, "LOOK_AGAIN_AFTER", 0.01)
    (held,) = await add(store)
    apart = replace(request(), apart=True)
    holder = await sessions.begin()
    await holder.connection.execute("SELECT FROM windlass.ready FOR UPDATE")
    assert (await store.claim(apart)).claim is None
    await add(store)
    assert (await store.claim(apart)).claim is not None  # so that the bound passes what is held
    await holder.rollback()

    async with asyncio.timeout(10):
        while (found := (await store.claim(apart)).claim) is None:
            await asyncio.sleep(0.01)

    assert [task.id for task in found.tasks] == [held]
