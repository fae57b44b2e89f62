"""Retention beside readers, writers, other retentions and a pooler."""

import asyncio
import time
from datetime import timedelta
from uuid import UUID

import pytest

from contract.postgres_keeper import DAY, DEADLINE, NOON, TODAY, Keeper, history_name, one_day
from windlass.model.errors import StoreUnavailable
from windlass.model.task import (
    Outcome,
    Retained,
    Retention,
    TaskFilter,
    TaskState,
)
from windlass.store.postgres import history as history_module


@pytest.mark.needs_direct("a partition is detached concurrently")
@pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ"])
async def test_a_reader_is_waited_for_and_stops_nobody(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch, isolation: str
) -> None:
    monkeypatch.setattr(history_module, "DETACH_WITHIN", 2 * DEADLINE)
    over = await keeper.end(retention=timedelta(0))
    name = history_name(await keeper.place_of(over))
    await keeper.at(NOON + DAY)
    reader = await keeper.open_reader(isolation)

    retaining = await keeper.waiting(keeper.retain(), by=reader)
    async with asyncio.timeout(DEADLINE):
        ended = await keeper.end()
        unforeseen = await keeper.end(retention=100 * DAY)
        await keeper.enqueue(idempotency_key="k")
        assert await keeper.is_known(ended)
        assert (await keeper.store.tasks(TaskFilter(statuses=(TaskState.COMPLETED,)))).records
        await keeper.open_reader("READ COMMITTED")
        seen = await reader.fetchval("SELECT count(*) FROM windlass.history WHERE id = $1", ended)

    assert not retaining.done()
    assert seen == (isolation == "READ COMMITTED")
    await reader.execute("COMMIT")
    assert await retaining == Retained(partitions=1)
    assert not await keeper.is_known(over)
    assert await keeper.is_known(unforeseen)
    assert name not in [row["name"] for row in await keeper.partitions()]


@pytest.mark.usefixtures("patience")
async def test_a_reader_that_stays_is_waited_for_again_and_again(keeper: Keeper) -> None:
    over = await keeper.end(retention=timedelta(0))
    name = history_name(await keeper.place_of(over))
    await keeper.at(NOON + DAY)
    reader = await keeper.open_reader("REPEATABLE READ")

    turns = [await keeper.retain() for _ in range(3)]

    assert turns == [Retained(waiting=(name,))] * 3
    await reader.execute("COMMIT")
    assert (await keeper.retain()).partitions == 1


@pytest.mark.needs_direct("a partition is detached concurrently")
async def test_a_detachment_killed_half_way_is_finished_at_the_next_turn(keeper: Keeper) -> None:
    over = await keeper.end(retention=timedelta(0), idempotency_key=None)
    name = history_name(await keeper.place_of(over))
    await keeper.at(NOON + DAY)
    reader = await keeper.open_reader("READ COMMITTED")

    retaining = await keeper.waiting(keeper.retain(), by=reader)
    detaching = await keeper.blocked_by(reader)
    await keeper.watcher.execute("SELECT pg_terminate_backend($1)", detaching)
    with pytest.raises(StoreUnavailable):
        await retaining

    (row,) = [row for row in await keeper.partitions() if row["name"] == name]
    assert (row["attached"], row["pending"]) == (True, True)
    assert await keeper.is_known(await keeper.end())
    assert await keeper.is_known(await keeper.end(retention=100 * DAY))
    await reader.execute("COMMIT")
    assert await keeper.retain() == Retained(partitions=1)
    assert name not in [row["name"] for row in await keeper.partitions()]
    assert await keeper.retain() == Retained()


@pytest.mark.usefixtures("patience")
async def test_two_retentions_at_once_are_harmless(keeper: Keeper) -> None:
    # A deposed leader may still be detaching when the next one begins.
    over = await keeper.end(retention=timedelta(0), idempotency_key="k")
    await keeper.at(NOON + 8 * DAY)
    reader = await keeper.open_reader("READ COMMITTED")
    retaining = await keeper.waiting(keeper.retain(), by=reader)

    second = asyncio.create_task(keeper.retain())
    deadline = time.monotonic() + DEADLINE
    while not second.done() and await keeper.waiters() < 2:
        assert time.monotonic() < deadline, "neither waited nor ended"
        await asyncio.sleep(0.005)
    await reader.execute("COMMIT")
    results = await asyncio.gather(retaining, second, return_exceptions=True)

    assert [one for one in results if not isinstance(one, Retained)] == []
    await keeper.retain()
    assert not await keeper.is_known(over)
    assert await keeper.keys() == []


async def test_a_settlement_under_way_is_waited_for_and_kept(keeper: Keeper) -> None:
    over = await keeper.end(retention=timedelta(0))
    await keeper.at(NOON + DAY)
    writer = await keeper.open_reader("READ COMMITTED")
    other = UUID(int=77)
    await writer.execute(
        "INSERT INTO windlass.history (id, type, queue, status, priority, max_attempts, attempts, "
        "generation, drop_on, created_at, scheduled_for, completed_at, payload) "
        "VALUES ($1, 'a', 'b', 'completed', 1, 1, 1, 1, $2, now(), now(), now(), '{}')",
        other,
        TODAY + 7 * DAY,
    )

    retaining = await keeper.waiting(keeper.retain(), by=writer)
    await writer.execute("COMMIT")

    assert await retaining == Retained(partitions=1)
    assert not await keeper.is_known(over)
    assert await keeper.is_known(other)


async def test_a_table_left_over_from_a_detachment_is_dropped_with_its_keys(
    keeper: Keeper,
) -> None:
    over = await keeper.end(retention=timedelta(0), idempotency_key="k")
    name = history_name(await keeper.place_of(over))
    await keeper.watcher.execute(f"ALTER TABLE windlass.history DETACH PARTITION windlass.{name}")
    await keeper.at(NOON + 7 * DAY)
    assert name not in map(history_name, await keeper.spans())
    kept = await keeper.retain()
    assert (kept.waiting, await keeper.keys()) == ((), ["k"])

    await keeper.at(NOON + 8 * DAY)
    dropped = await keeper.retain()

    assert dropped.partitions > 0
    assert name not in [row["name"] for row in await keeper.partitions()]
    assert await keeper.keys() == []


async def test_a_left_over_table_that_somebody_reads_waits_for_the_next_turn(
    keeper: Keeper,
) -> None:
    name = history_name(await keeper.place_of(await keeper.end(retention=timedelta(0))))
    await keeper.watcher.execute(f"ALTER TABLE windlass.history DETACH PARTITION windlass.{name}")
    await keeper.at(NOON + DAY)
    reader = await keeper.open_reader("READ COMMITTED")
    await reader.fetchval(f"SELECT count(*) FROM windlass.{name}")

    assert await keeper.retain() == Retained(waiting=(name,))
    await reader.execute("COMMIT")
    assert await keeper.retain() == Retained(partitions=1)


async def test_behind_a_pooler_retention_gives_up_at_once_beside_a_reader(keeper: Keeper) -> None:
    pooled = await keeper.open_store(pooler=True)
    over = await keeper.end(retention=timedelta(0), idempotency_key="k")
    earliest = history_name((await keeper.spans())[0])
    await keeper.at(NOON + 8 * DAY)
    reader = await keeper.open_reader("READ COMMITTED")

    async with asyncio.timeout(DEADLINE):
        given_up = await keeper.retain(pooled)
    assert (given_up.partitions, given_up.waiting) == (0, (earliest,))
    assert await keeper.keys() == ["k"]
    assert not any(row["pending"] for row in await keeper.partitions())
    assert await keeper.is_known(await keeper.end())

    await reader.execute("COMMIT")
    assert (await keeper.retain(pooled)).waiting == ()
    assert not await keeper.is_known(over)
    assert await keeper.keys() == []


async def test_behind_a_pooler_a_pending_detachment_is_finished(keeper: Keeper) -> None:
    pooled = await keeper.open_store(pooler=True)
    await keeper.end(retention=timedelta(0))
    await keeper.at(NOON + DAY)
    reader = await keeper.open_reader("READ COMMITTED")
    retaining = await keeper.waiting(keeper.retain(), by=reader)
    await keeper.watcher.execute("SELECT pg_terminate_backend($1)", await keeper.blocked_by(reader))
    await asyncio.gather(retaining, return_exceptions=True)
    await reader.execute("COMMIT")

    assert await keeper.retain(pooled) == Retained(partitions=1)


async def test_the_retention_of_the_settings_is_used(keeper: Keeper) -> None:
    keeper.store = await keeper.open_store(
        retention=Retention(ended=2 * DAY, dead=3 * DAY, keys=4 * DAY)
    )

    ended = await keeper.place_of(await keeper.end())
    with_key = await keeper.place_of(await keeper.end(idempotency_key="k"))
    dead = await keeper.end(Outcome.DEAD)

    assert (ended, with_key) == (one_day(TODAY + 2 * DAY), one_day(TODAY + 4 * DAY))
    drop_on = await keeper.watcher.fetchval("SELECT drop_on FROM windlass.dead WHERE id = $1", dead)
    assert drop_on == TODAY + 3 * DAY
