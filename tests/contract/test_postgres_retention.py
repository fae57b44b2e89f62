"""What is over is dropped, with its keys, and nothing else."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from contract.postgres_keeper import DAY, NOON, TODAY, Keeper
from windlass.model.task import (
    Enqueued,
    Outcome,
    Retained,
)


async def test_only_what_is_over_is_dropped(keeper: Keeper) -> None:
    brief = await keeper.end(retention=timedelta(0))
    daily = await keeper.end(retention=DAY)
    weekly = await keeper.end(retention=40 * DAY)
    midnight = datetime.combine(TODAY + DAY, datetime.min.time(), UTC)
    week = await keeper.place_of(weekly)
    steps = [
        (NOON, {brief, daily, weekly}),
        (midnight - timedelta(microseconds=1), {brief, daily, weekly}),
        (midnight, {daily, weekly}),
        (midnight + DAY - timedelta(microseconds=1), {daily, weekly}),
        (midnight + DAY, {weekly}),
        (datetime.combine(week.past - DAY, datetime.max.time(), UTC), {weekly}),
        (datetime.combine(week.past, datetime.min.time(), UTC), set()),
    ]

    for moment, expected in steps:
        await keeper.at(moment)
        await keeper.retain()
        known = {task_id for task_id in (brief, daily, weekly) if await keeper.is_known(task_id)}
        assert known == expected, moment


async def test_what_was_dropped_is_counted(keeper: Keeper) -> None:
    await keeper.end(retention=timedelta(0))
    await keeper.end(retention=DAY)
    await keeper.end(Outcome.DEAD)
    over = sum(span.past <= TODAY + 60 * DAY for span in await keeper.spans())
    await keeper.at(NOON + 60 * DAY)

    assert await keeper.retain() == Retained(partitions=over, dead=1)
    assert await keeper.retain() == Retained()


async def test_a_dead_task_is_kept_for_its_own_retention(keeper: Keeper) -> None:
    failed = await keeper.end(Outcome.FAILED)
    dead = await keeper.end(Outcome.DEAD, retention=DAY)

    await keeper.at(NOON + 2 * DAY)
    await keeper.retain()
    assert [await keeper.is_known(one) for one in (failed, dead)] == [True, False]
    await keeper.at(NOON + 30 * DAY)
    await keeper.retain()
    assert await keeper.is_known(failed)
    await keeper.at(NOON + 31 * DAY)
    await keeper.retain()
    assert not await keeper.is_known(failed)


@pytest.mark.parametrize("outcome", [Outcome.COMPLETED, Outcome.CANCELLED, Outcome.DEAD])
async def test_a_key_is_forgotten_with_its_task_and_not_before(
    keeper: Keeper, outcome: Outcome
) -> None:
    first = await keeper.end(outcome, idempotency_key="k", retention=timedelta(0))
    other = await keeper.enqueue(idempotency_key="other")

    # The key is remembered for a week, so the task is as well.
    await keeper.at(NOON + 7 * DAY)
    await keeper.retain()
    assert await keeper.is_known(first)
    assert await keeper.enqueue(idempotency_key="k") == Enqueued(first, created=False)

    await keeper.at(NOON + 8 * DAY)
    await keeper.retain()
    assert not await keeper.is_known(first)
    assert await keeper.keys() == ["other"]
    assert (await keeper.enqueue(idempotency_key="k")).created
    assert await keeper.enqueue(idempotency_key="other") == Enqueued(other.id, created=False)


async def test_a_key_is_remembered_for_longer_than_its_task_would_be(keeper: Keeper) -> None:
    options = keeper.store._options
    kept = replace(options.retention, ended=DAY)
    keeper.store._options = replace(options, retention=kept)
    first = await keeper.end(Outcome.COMPLETED, idempotency_key="k")

    await keeper.at(NOON + 3 * DAY)
    await keeper.retain()

    assert await keeper.enqueue(idempotency_key="k") == Enqueued(first, created=False)


async def test_a_key_is_not_forgotten_while_its_retried_task_lives(keeper: Keeper) -> None:
    task_id = await keeper.end(Outcome.CANCELLED, idempotency_key="k")
    await keeper.store.retry(task_id)

    await keeper.at(NOON + 60 * DAY)
    await keeper.retain()

    assert await keeper.keys() == ["k"]
    assert await keeper.enqueue(idempotency_key="k") == Enqueued(task_id, created=False)


async def test_a_key_of_a_later_task_is_not_forgotten_with_an_earlier_one(keeper: Keeper) -> None:
    # Possible only by hand: the key's row names another task than the one that is dropped.
    await keeper.end(idempotency_key="k", retention=timedelta(0))
    await keeper.watcher.execute("UPDATE windlass.idempotency SET task_id = gen_random_uuid()")
    await keeper.at(NOON + 60 * DAY)

    await keeper.retain()

    assert await keeper.keys() == ["k"]
