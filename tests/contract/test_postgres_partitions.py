"""The partitions of ended tasks are there when they are needed."""

import asyncio
from datetime import timedelta
from itertools import pairwise

import pytest

from contract.postgres_keeper import DAY, DEADLINE, LEASE, NOON, TODAY, Keeper, days, one_day
from windlass.model.task import (
    Answer,
    CancelAnswer,
    Fence,
    Outcome,
    Settlement,
    TaskState,
    TypeDefaults,
)
from windlass.policy.retention import DAILY_UNTIL, DAYS_AHEAD


async def test_places_for_the_coming_days_are_made_ahead(keeper: Keeper) -> None:
    assert await keeper.spans() == []

    made = await keeper.prepare()

    first = TODAY + 7 * DAY
    wanted = [one_day(first + ahead * DAY) for ahead in range(DAYS_AHEAD + 2)]
    assert await keeper.spans() == wanted
    assert made == len(wanted)
    assert await keeper.prepare() == 0


async def test_a_task_that_ends_in_the_coming_days_needs_no_new_place(keeper: Keeper) -> None:
    await keeper.prepare()
    prepared = await keeper.spans()

    for ahead in range(DAYS_AHEAD + 1):
        await keeper.at(NOON + ahead * DAY)
        assert await keeper.place_of(await keeper.end()) == one_day(TODAY + (7 + ahead) * DAY)

    assert await keeper.spans() == prepared


async def test_places_are_made_for_the_retentions_of_registered_types(keeper: Keeper) -> None:
    await keeper.store.register_types([TypeDefaults("resize", retention=20 * DAY)])

    await keeper.prepare()

    assert one_day(TODAY + 20 * DAY) in await keeper.spans()


@pytest.mark.parametrize("retention", [None, timedelta(0), timedelta(hours=13), 30 * DAY])
async def test_a_missing_place_is_made_when_a_task_ends(
    keeper: Keeper, retention: timedelta | None
) -> None:
    task_id = await keeper.end(retention=retention)

    may_go = NOON + (7 * DAY if retention is None else retention)
    assert await keeper.place_of(task_id) == one_day(may_go.date())


async def test_a_place_beyond_thirty_days_spans_a_week(keeper: Keeper) -> None:
    task_id = await keeper.end(retention=400 * DAY)

    first, past = await keeper.place_of(task_id)
    assert past - first == 7 * DAY
    assert first.weekday() == 0
    assert first <= TODAY + 400 * DAY < past


async def test_weeks_and_days_meet_without_a_gap_or_an_overlap(keeper: Keeper) -> None:
    retentions = [timedelta(days=number) for number in range(DAILY_UNTIL - 3, DAILY_UNTIL + 6)]

    for passed in range(12):
        await keeper.at(NOON + passed * DAY)
        for retention in retentions:
            span = await keeper.place_of(await keeper.end(retention=retention))
            assert span.first <= TODAY + passed * DAY + retention < span.past

    spans = await keeper.spans()
    assert all(one.past <= other.first for one, other in pairwise(spans))


@pytest.mark.parametrize("outcome", [Outcome.COMPLETED, Outcome.CANCELLED])
async def test_a_missing_place_is_made_for_either_end(keeper: Keeper, outcome: Outcome) -> None:
    task_id = await keeper.end(outcome, retention=400 * DAY)

    assert (await keeper.store.get(task_id)).status.value == outcome.value


async def test_a_missing_place_is_made_for_a_cancelled_task(keeper: Keeper) -> None:
    task_id = (await keeper.enqueue(retention=400 * DAY)).id

    assert await keeper.store.cancel(task_id, "no need") is CancelAnswer.CANCELLED

    assert (await keeper.store.get(task_id)).status is TaskState.CANCELLED


async def test_a_missing_place_is_made_for_a_rescued_task_that_was_cancelled(
    keeper: Keeper,
) -> None:
    task_id = (await keeper.enqueue(retention=400 * DAY)).id
    await keeper.claim()
    await keeper.store.cancel(task_id, "no need")
    await keeper.at(NOON + 2 * LEASE)

    rescued = await keeper.store.rescue(100)

    assert rescued.cancelled == 1
    assert (await keeper.store.get(task_id)).status is TaskState.CANCELLED


async def test_a_place_is_made_while_history_is_read_and_written(keeper: Keeper) -> None:
    await keeper.end()
    await keeper.open_reader("REPEATABLE READ")
    writer = await keeper.open_reader("READ COMMITTED")
    await writer.execute(
        "INSERT INTO windlass.history (id, type, queue, status, priority, max_attempts, attempts, "
        "generation, drop_on, created_at, scheduled_for, completed_at, payload) "
        "VALUES (gen_random_uuid(), 'a', 'b', 'completed', 1, 1, 1, 1, $1, now(), now(), now(), '{}')",
        TODAY + 7 * DAY,
    )

    async with asyncio.timeout(DEADLINE):
        task_id = await keeper.end(retention=400 * DAY)

    assert await keeper.is_known(task_id)


async def test_two_that_miss_the_same_place_make_it_once(keeper: Keeper) -> None:
    task_id = (await keeper.enqueue(retention=400 * DAY)).id
    held = await keeper.claim()
    making = await keeper.open_reader("READ COMMITTED")
    monday = TODAY + 400 * DAY - (TODAY + 400 * DAY).weekday() * DAY
    add = keeper.store._sql.statement("add_history_partition")
    assert await making.fetchval(add, monday, monday + 7 * DAY)

    settlement = Settlement(held.token, task_id, 1, Outcome.COMPLETED)
    settling = await keeper.waiting(keeper.store.settle([settlement]), by=making)
    await making.execute("COMMIT")

    assert await settling == [Answer.APPLIED]
    assert await keeper.place_of(task_id) == days(monday, monday + 7 * DAY)


@pytest.mark.parametrize("has_place", [True, False])
async def test_whether_there_is_a_place_is_found_out_whatever_plan_the_server_makes(
    keeper: Keeper, has_place: bool
) -> None:
    await keeper.prepare()
    spans = await keeper.spans()
    task_id = (await keeper.enqueue(retention=(7 if has_place else 400) * DAY)).id
    held = await keeper.claim()
    await keeper.watcher.execute("ANALYZE pg_inherits, pg_class")  # as autovacuum does

    await keeper.store.check_completion(Fence(held.token, task_id, 1))

    assert (await keeper.spans() == spans) is has_place


async def test_whether_there_is_a_place_is_found_out_on_the_day_where_the_last_one_ends(
    keeper: Keeper,
) -> None:
    await keeper.prepare()
    past = max(span.past for span in await keeper.spans())
    today = (await keeper.store.now()).date()
    for day in (past - DAY, past):
        spans = await keeper.spans()
        task_id = (await keeper.enqueue(retention=day - today)).id
        held = await keeper.claim()

        await keeper.store.check_completion(Fence(held.token, task_id, 1))

        assert (await keeper.spans() == spans) is (day < past)
