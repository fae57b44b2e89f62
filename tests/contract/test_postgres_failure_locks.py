"""Where failures meet other sessions: a cancellation and a reopened task, retries that are stopped."""

import asyncio
from datetime import timedelta
from uuid import UUID

import pytest

from contract.postgres_sessions import (
    AT_ONCE,
    ERROR,
    LEASE,
    SECOND,
    Sessions,
    add,
    claim,
    granted,
    lead,
    settlements,
    worker_info,
)
from windlass.client import Client
from windlass.model.errors import StoreBusy, StoreUnavailable
from windlass.model.task import (
    Answer,
    Callback,
    CancelAnswer,
    Change,
    Expired,
    Leadership,
    NewTask,
    Outcome,
    Started,
    TaskState,
    TypeDefaults,
)
from windlass.registry import Registry
from windlass.store.postgres import operating
from windlass.store.postgres.store import PostgresStore


@pytest.mark.parametrize("undone", [False, True])
async def test_a_cancellation_of_what_has_ended_meanwhile_does_not_hit_the_reopened_task(
    store: PostgresStore, sessions: Sessions, undone: bool
) -> None:
    (task_id,) = await add(store)
    held = await claim(store)
    cancelling = await sessions.begin()
    assert await cancelling.store.cancel(task_id, "no need") is CancelAnswer.REQUESTED
    assert await store.settle(settlements(held, Outcome.DEAD)) == [Answer.APPLIED]

    reopening = await sessions.blocked(store.retry(task_id), by=cancelling)
    await (cancelling.rollback() if undone else cancelling.commit())
    await reopening

    assert await store.requested_cancellations([task_id]) == {}
    again = await claim(store)
    assert again.tasks[0].cancel_reason is None
    assert await store.settle(settlements(again, Outcome.COMPLETED)) == [Answer.APPLIED]
    assert (await store.get(task_id)).status is TaskState.COMPLETED


async def test_a_cancellation_that_meets_a_task_being_reopened_cancels_what_there_is_then(
    store: PostgresStore, sessions: Sessions
) -> None:
    (task_id,) = await add(store)
    await store.settle(settlements(await claim(store), Outcome.DEAD))
    reopening = await sessions.begin()
    await reopening.store.retry(task_id)

    # Nobody sees the reopened task yet: it has ended.
    async with asyncio.timeout(AT_ONCE):
        assert await store.cancel(task_id, "no need") is CancelAnswer.ENDED
    await reopening.commit()
    assert await store.cancel(task_id, "no need") is CancelAnswer.CANCELLED


async def test_a_task_that_is_reopened_waits_for_a_cancellation_no_longer_than_it_may(
    store: PostgresStore, sessions: Sessions
) -> None:
    (task_id,) = await add(store)
    held = await claim(store)
    users = await sessions.connect()
    cancelling = users.transaction()
    await cancelling.start()
    await users.execute("SELECT windlass.cancel($1)", task_id)
    await store.settle(settlements(held, Outcome.DEAD))

    with pytest.raises(StoreUnavailable):
        async with asyncio.timeout(60):
            await store.retry(task_id)

    assert (await store.get(task_id)).status is TaskState.DEAD
    await cancelling.rollback()
    await store.retry(task_id)
    assert (await store.get(task_id)).status is TaskState.PENDING


@pytest.mark.parametrize("stops", [True, False])
async def test_a_settlement_does_not_wait_for_whoever_stops_or_allows_retries(
    store: PostgresStore, sessions: Sessions, stops: bool
) -> None:
    if not stops:
        await store.stop_retries("resize", "stop")
    (task_id,) = await add(store)
    held = await claim(store)
    operator = await sessions.begin()
    if stops:
        await operator.store.stop_retries("resize", "stop")
    else:
        await operator.store.allow_retries("resize")

    async with asyncio.timeout(AT_ONCE):
        answers = await store.settle(settlements(held, Outcome.RETRIED, delay=60.0))

    assert answers == [Answer.APPLIED if stops else Answer.GIVEN_UP]
    await operator.commit()
    expected = TaskState.SCHEDULED if stops else TaskState.DEAD
    assert (await store.get(task_id)).status is expected


@pytest.mark.parametrize("holds", ["place", "task"])
async def test_burying_goes_round_what_somebody_holds(
    store: PostgresStore, sessions: Sessions, holds: str
) -> None:
    first, second = await add(store, 2)
    await store.settle(settlements(await claim(store, limit=2), Outcome.RETRIED, delay=3600.0))
    await store.stop_retries("resize", "stop")
    holding = await sessions.begin()
    await (holding.store.cancel(first, "no need") if holds == "place" else holding.lock_task(first))

    async with asyncio.timeout(AT_ONCE):
        assert (await store.bury_scheduled("resize", 10)).number == 1

    assert await sessions.places(second) == ["dead"]
    await holding.rollback()
    assert (await store.bury_scheduled("resize", 10)).number == 1
    assert await sessions.places(first) == ["dead"]


@pytest.mark.parametrize("holds", ["place", "task"])
async def test_burying_what_is_ready_goes_round_what_somebody_holds(
    store: PostgresStore, sessions: Sessions, holds: str
) -> None:
    first, second = await add(store, 2)
    await store.settle(settlements(await claim(store, limit=2), Outcome.RETRIED))
    await store.stop_retries("resize", "stop")
    holding = await sessions.begin()
    await (holding.store.cancel(first, "no need") if holds == "place" else holding.lock_task(first))

    async with asyncio.timeout(AT_ONCE):
        assert (await store.bury_ready("resize", 10)).number == 1

    assert await sessions.places(second) == ["dead"]
    await holding.rollback()
    assert (await store.bury_ready("resize", 10)).number == 1
    assert await sessions.places(first) == ["dead"]


@pytest.mark.parametrize("undone", [False, True])
async def test_what_somebody_is_about_to_claim_is_not_buried(
    store: PostgresStore, sessions: Sessions, undone: bool
) -> None:
    ids = await add(store, 2)
    await store.settle(settlements(await claim(store, limit=2), Outcome.RETRIED))
    await store.stop_retries("resize", "stop")
    claiming = await sessions.begin()
    held = await claim(claiming.store, limit=1)
    (claimed,) = [task.id for task in held.tasks]
    (free,) = set(ids) - {claimed}

    async with asyncio.timeout(AT_ONCE):
        assert (await store.bury_ready("resize", 10)).number == 1

    assert await sessions.places(free) == ["dead"]
    if undone:
        await claiming.rollback()
        assert (await store.bury_ready("resize", 10)).number == 1
        assert await sessions.places(claimed) == ["dead"]
    else:
        await claiming.commit()
        assert (await store.bury_ready("resize", 10)).number == 0
        assert await sessions.places(claimed) == ["claim"]
        assert await store.settle(settlements(held, Outcome.COMPLETED)) == [Answer.APPLIED]


@pytest.mark.parametrize("delay", [0.0, 60.0])
async def test_what_waits_in_lanes_that_rest_is_buried(
    store: PostgresStore, sessions: Sessions, delay: float
) -> None:
    ids = await add(store, 3)
    await store.settle(settlements(await claim(store, limit=3), Outcome.RETRIED, delay=delay))
    await sessions.watcher.execute(
        "WITH gone AS (DELETE FROM windlass.lane RETURNING lane, queue, type, priority, kind) "
        "INSERT INTO windlass.resting_lane SELECT * FROM gone"
    )
    await store.stop_retries("resize", "stop")

    bury = store.bury_scheduled if delay else store.bury_ready
    assert (await bury("resize", 10)).number == 3

    for task_id in ids:
        assert await sessions.places(task_id) == ["dead"]


@pytest.mark.parametrize("delay", [0.0, 60.0])
async def test_a_retry_that_is_put_off_for_too_long_leaves_nothing_where_it_would_wait(
    store: PostgresStore, sessions: Sessions, delay: float
) -> None:
    (task_id,) = await add(store)
    await store.settle(settlements(await claim(store), Outcome.RETRIED))
    await sessions.advance(timedelta(seconds=61))
    late = settlements(await claim(store), Outcome.SNOOZED, error=ERROR, delay=delay, max_age=60.0)

    assert await store.settle(late) == [Answer.GIVEN_UP]

    assert await sessions.places(task_id) == ["dead"]


@pytest.mark.parametrize("delay", [0.0, 60.0])
async def test_burying_goes_on_behind_what_it_has_passed_over(
    store: PostgresStore, sessions: Sessions, monkeypatch: pytest.MonkeyPatch, delay: float
) -> None:
    monkeypatch.setattr(operating, "LOOKS", 3)
    retried = await add(store, 2)
    await store.settle(settlements(await claim(store, limit=2), Outcome.RETRIED, delay=delay))
    fresh = await add(store, 7, delay=delay)
    late = await add(store, 1, priority=20)
    await store.settle(settlements(await claim(store, limit=1), Outcome.RETRIED, delay=delay))
    await store.stop_retries("resize", "stop")

    bury = store.bury_scheduled if delay else store.bury_ready
    numbers, after = [], None
    for _ in range(20):
        number, after = await bury("resize", 10, after=after)
        numbers.append(number)
        if after is None:
            break

    assert sum(numbers) == 3
    assert len(numbers) == 3 + 1 + 1 + 1  # a lane of nine, its end, a lane of one, none
    for task_id in (*retried, *late):
        assert await sessions.places(task_id) == ["dead"]
    await sessions.advance(timedelta(seconds=61))
    await store.promote(10)
    assert set(await granted(store)) == set(fresh)


@pytest.mark.parametrize("delay", [0.0, 60.0])
@pytest.mark.parametrize("table", ["attempt", "dead"])
async def test_burying_waits_for_what_it_cannot_go_round_only_so_long(
    store: PostgresStore, sessions: Sessions, table: str, delay: float
) -> None:
    await add(store)
    await store.settle(settlements(await claim(store), Outcome.RETRIED, delay=delay))
    holding = await sessions.begin()
    await holding.connection.execute(f"LOCK TABLE windlass.{table} IN SHARE MODE")

    client = Client(store=store, registry=Registry(), max_payload_bytes=1000, ageing=SECOND)
    with pytest.raises(StoreBusy, match="retries of 'resize' are stopped, and 0 tasks"):
        await client.stop_retries("resize", "stop")

    await holding.rollback()
    assert await client.stop_retries("resize", "stop") == 1


async def test_what_follows_is_there_only_if_the_end_is(
    store: PostgresStore, sessions: Sessions
) -> None:
    template = NewTask(id=(await add(store))[0], type="after", payload="{}")
    await store.register_types([TypeDefaults("resize", on_success=Callback(template))])
    held = await claim(store)
    settling = await sessions.begin()
    asked = settlements(held, Outcome.COMPLETED, calls_back=True)

    assert await settling.store.settle(asked) == [Answer.APPLIED]
    await settling.rollback()
    assert await store.has_work(["after"], None) is False

    assert await store.settle(asked) == [Answer.APPLIED]
    assert await store.has_work(["after"], None) is True


async def test_what_cannot_be_enqueued_does_not_keep_a_task_from_its_end(
    store: PostgresStore, sessions: Sessions
) -> None:
    (task_id,) = await add(store)
    too_large = NewTask(task_id, "after", '{"text": "' + "x" * 100 + '"}')
    await store.register_types([TypeDefaults("resize", on_success=Callback(too_large))])
    await sessions.watcher.execute("UPDATE windlass.setting SET max_payload_bytes = 50")
    held = await claim(store)

    answers = await store.settle(settlements(held, Outcome.COMPLETED, calls_back=True))

    assert answers == [Answer.APPLIED]
    assert (await store.get(task_id)).status is TaskState.COMPLETED
    assert await store.has_work(["after"], None) is False


LOCK_EXPIRY = "SELECT FROM windlass.expiry WHERE task_id = $1 FOR UPDATE"


@pytest.mark.parametrize("delay", [0.0, 3600.0])
@pytest.mark.parametrize("how", ["changed", "its task", "its expiry"])
async def test_expiring_goes_round_what_somebody_holds(
    store: PostgresStore, sessions: Sessions, how: str, delay: float
) -> None:
    held, free = await add(store, 2, expires=60.0, delay=delay)
    (other,) = await add(store, expires=60.0, delay=3600.0 - delay)
    await sessions.advance(timedelta(seconds=61))
    leadership = await lead(store)
    changing = await sessions.begin()
    if how == "changed":
        await changing.store.change(held, Change(priority=50))
    elif how == "its task":
        await changing.lock_task(held)
    else:
        await changing.connection.execute(LOCK_EXPIRY, held)

    async with asyncio.timeout(AT_ONCE):
        assert (await store.expire(10, leadership=leadership)).cancelled == 2

    assert await sessions.places(free) == await sessions.places(other) == ["history"]
    await changing.commit()
    assert await store.expire(10, leadership=leadership) == Expired(1)
    assert await sessions.places(held) == ["history"]


@pytest.mark.parametrize("how", ["claimed", "held"])
async def test_what_cannot_expire_now_does_not_hide_what_can(
    store: PostgresStore, sessions: Sessions, how: str
) -> None:
    ids = await add(store, 5, expires=10.0)
    await add(store, 5, expires=20.0)
    blocking = await sessions.begin()
    if how == "claimed":
        await claim(store, limit=5)
    else:
        for task_id in ids:
            await blocking.lock_task(task_id)
    await sessions.advance(timedelta(seconds=25))
    leadership = await lead(store)

    assert await store.expire(5, leadership=leadership) == Expired()
    assert await store.expire(5, leadership=leadership) == Expired(5, has_more=True)

    await blocking.rollback()
    expected = 0 if how == "claimed" else 5
    assert (await store.expire(5, leadership=leadership)).cancelled == expected


async def test_what_has_begun_is_forgotten_while_it_runs(
    store: PostgresStore, sessions: Sessions
) -> None:
    await add(store, 2, expires=5.0)
    held = await claim(store, limit=2)
    running, waiting = held.tasks
    await store.start([Started(held.token, running.id, running.generation, 0.5)])
    await sessions.advance(timedelta(seconds=6))
    leadership = await lead(store)

    assert await store.expire(10, leadership=leadership) == Expired()

    expiring = await sessions.watcher.fetch("SELECT task_id FROM windlass.expiry")
    assert [task_id for (task_id,) in expiring] == [waiting.id]


async def fail_unknown(store: PostgresStore, leadership: Leadership) -> list[UUID]:
    return await store.fail_unknown(
        "resize", error=ERROR, ready_for=SECOND, limit=10, leadership=leadership
    )


async def test_failing_unknown_types_goes_round_what_somebody_holds(
    store: PostgresStore, sessions: Sessions
) -> None:
    held, free = await add(store, 2)
    await sessions.advance(2 * SECOND)
    leadership = await lead(store)
    changing = await sessions.begin()
    await changing.store.change(held, Change(priority=50))

    async with asyncio.timeout(AT_ONCE):
        assert await fail_unknown(store, leadership) == [free]

    await changing.commit()
    assert await fail_unknown(store, leadership) == [held]
    assert await sessions.places(held) == ["dead"]


@pytest.mark.parametrize("undone", [False, True])
async def test_what_somebody_is_about_to_claim_does_not_fail(
    store: PostgresStore, sessions: Sessions, undone: bool
) -> None:
    (task_id,) = await add(store)
    await sessions.advance(2 * SECOND)
    leadership = await lead(store)
    claiming = await sessions.begin()
    held = await claim(claiming.store)

    async with asyncio.timeout(AT_ONCE):
        assert await fail_unknown(store, leadership) == []

    if undone:
        await claiming.rollback()
        assert await fail_unknown(store, leadership) == [task_id]
    else:
        await claiming.commit()
        assert await fail_unknown(store, leadership) == []
        assert await store.settle(settlements(held, Outcome.COMPLETED)) == [Answer.APPLIED]


async def test_nobody_claims_what_is_about_to_fail(
    store: PostgresStore, sessions: Sessions
) -> None:
    (task_id,) = await add(store)
    await sessions.advance(2 * SECOND)
    leadership = await lead(store)
    leading = await sessions.begin()
    assert await fail_unknown(leading.store, leadership) == [task_id]
    await store.register(worker_info(), lease=LEASE)

    async with asyncio.timeout(AT_ONCE):
        assert await granted(store) == []
    await leading.commit()

    assert await sessions.places(task_id) == ["dead"]


async def test_a_worker_that_registers_just_then_saves_its_tasks(
    store: PostgresStore, sessions: Sessions
) -> None:
    ids = await add(store, 2)
    await sessions.advance(2 * SECOND)
    leadership = await lead(store)
    registering = await sessions.begin()
    await registering.connection.execute("LOCK TABLE windlass.worker")

    failing = await sessions.blocked(fail_unknown(store, leadership), by=registering)
    await registering.store.register(worker_info(), lease=LEASE)
    await registering.commit()

    assert await failing == []
    assert await granted(store, limit=2) == ids


async def test_what_has_begun_is_forgotten_among_what_expires(
    store: PostgresStore, sessions: Sessions
) -> None:
    await add(store, 2, expires=1.0)
    held = await claim(store, limit=1)
    await store.settle(settlements(held, Outcome.COMPLETED))
    held = await claim(store, limit=1)
    await store.settle(settlements(held, Outcome.RETRIED, delay=3600.0))
    await sessions.advance(timedelta(seconds=2))
    leadership = await lead(store)

    assert await store.expire(2, leadership=leadership) == Expired(0, has_more=True)

    assert await sessions.watcher.fetchval("SELECT count(*) FROM windlass.expiry") == 0
    assert await store.expire(2, leadership=leadership) == Expired()
