"""Enqueues, retries and registrations that meet their twins."""

import asyncio
from dataclasses import replace
from uuid import UUID

import pytest

from contract.postgres_sessions import (
    AT_ONCE,
    DAY,
    LEASE,
    OTHER_WORKER,
    WORKER,
    Sessions,
    add,
    bury,
    claim,
    granted,
    lead,
    new_task,
    settlements,
    worker_info,
)
from windlass.model.errors import (
    IdempotencyConflict,
    WrongState,
)
from windlass.model.task import (
    Answer,
    Enqueued,
    Outcome,
    Pulse,
    TypeDefaults,
)
from windlass.store.postgres import enqueueing
from windlass.store.postgres.store import PostgresStore

# Twin enqueues


async def test_an_enqueue_waits_for_its_uncommitted_twin_and_answers_with_the_first(
    store: PostgresStore, sessions: Sessions
) -> None:
    producer = await sessions.begin()
    (first,) = await producer.store.enqueue([new_task(idempotency_key="k")])

    twin = await sessions.blocked(store.enqueue([new_task(idempotency_key="k")]), by=producer)
    await producer.commit()

    assert await twin == [Enqueued(first.id, created=False)]
    assert await granted(store) == [first.id]


async def test_an_enqueue_whose_twin_is_undone_creates_the_task(
    store: PostgresStore, sessions: Sessions
) -> None:
    producer = await sessions.begin()
    await producer.store.enqueue([new_task(idempotency_key="k")])
    second = new_task(idempotency_key="k")

    twin = await sessions.blocked(store.enqueue([second]), by=producer)
    await producer.rollback()

    assert await twin == [Enqueued(second.id, created=True)]
    assert await granted(store) == [second.id]


async def test_an_enqueue_whose_twin_has_another_payload_is_refused_as_a_whole(
    store: PostgresStore, sessions: Sessions
) -> None:
    producer = await sessions.begin()
    (first,) = await producer.store.enqueue([new_task(idempotency_key="k", payload='{"a": 1}')])

    other = new_task(idempotency_key="k", payload='{"a": 2}')
    twin = await sessions.blocked(store.enqueue([new_task(), other]), by=producer)
    await producer.commit()

    with pytest.raises(IdempotencyConflict):
        await twin
    assert await granted(store) == [first.id]


@pytest.mark.parametrize("key", [None, "k"])
async def test_an_enqueue_repeated_while_the_first_is_under_way_answers_with_it(
    store: PostgresStore, sessions: Sessions, key: str | None
) -> None:
    task = new_task(idempotency_key=key)
    producer = await sessions.begin()
    assert await producer.store.enqueue([task]) == [Enqueued(task.id, created=True)]

    repeating = await sessions.blocked(store.enqueue([task], repeated=True), by=producer)
    await producer.commit()

    assert [answer.id for answer in await repeating] == [task.id]
    assert await granted(store) == [task.id]


@pytest.mark.parametrize("number", [1, enqueueing.ENQUEUE_CHUNK])
async def test_idempotency_keys_are_taken_in_sorted_order(
    store: PostgresStore, sessions: Sessions, number: int
) -> None:
    producer = await sessions.begin()
    await producer.store.enqueue([new_task(idempotency_key="a")])

    tasks = [new_task(idempotency_key=f"b{place}") for place in range(number)]
    tasks.append(new_task(idempotency_key="a"))
    waiting = await sessions.blocked(store.enqueue(tasks), by=producer)

    # Whoever waits for the first key must not hold the last one yet.
    async with asyncio.timeout(AT_ONCE):
        (answer,) = await store.enqueue([new_task(idempotency_key="b0")])
    assert answer.created
    await producer.rollback()
    answers = await waiting
    assert (answers[0].created, answers[-1].created) == (False, True)


@pytest.mark.parametrize("undone", [False, True])
async def test_an_enqueue_waits_for_the_retention_that_forgets_its_key(
    store: PostgresStore, sessions: Sessions, undone: bool
) -> None:
    first = new_task(idempotency_key="k")
    await store.enqueue([first])
    assert await store.settle(settlements(await claim(store), Outcome.DEAD)) == [Answer.APPLIED]
    await sessions.advance(60 * DAY)
    retaining = await sessions.begin()
    discard = store._sql.statement("discard_old_dead")
    assert await retaining.connection.fetchval(discard, 100) == 1

    second = new_task(idempotency_key="k")
    waiting = await sessions.blocked(store.enqueue([second]), by=retaining)
    await (retaining.rollback() if undone else retaining.commit())

    expected = Enqueued(first.id, created=False) if undone else Enqueued(second.id, created=True)
    assert await waiting == [expected]


async def test_an_enqueue_into_a_new_lane_waits_for_nobody(
    store: PostgresStore, sessions: Sessions
) -> None:
    producer = await sessions.begin()
    first = await add(producer.store)

    async with asyncio.timeout(AT_ONCE):
        second = await add(store)
        assert await granted(store) == second
    await producer.commit()

    lanes = "SELECT count(*) FROM windlass.lane"
    assert await sessions.watcher.fetchval(lanes) == 2  # neither saw the other's
    third = await add(store)
    assert await granted(store) == first + third
    assert await store.tidy(leadership=await lead(store)) == 1
    assert await sessions.watcher.fetchval(lanes) == 1
    fourth = await add(store)
    assert await granted(store) == fourth


# Retry


@pytest.mark.parametrize("outcome", [Outcome.DEAD, Outcome.FAILED, Outcome.CANCELLED])
@pytest.mark.parametrize("undone", [False, True])
async def test_of_two_retries_one_wins(
    store: PostgresStore, sessions: Sessions, outcome: Outcome, undone: bool
) -> None:
    task_id = await bury(store, outcome)
    first = await sessions.begin()
    await first.store.retry(task_id)

    second = await sessions.blocked(store.retry(task_id), by=first)
    if undone:
        await first.rollback()
        await second
    else:
        await first.commit()
        with pytest.raises(WrongState):
            await second

    assert await sessions.places(task_id) == ["ready"]
    assert (await store.get(task_id)).generation == 2


async def test_a_discard_does_not_wait_for_a_retry(
    store: PostgresStore, sessions: Sessions
) -> None:
    task_id = await bury(store)
    await sessions.advance(60 * DAY)
    retrying = await sessions.begin()
    await retrying.store.retry(task_id)

    async with asyncio.timeout(AT_ONCE):
        retained = await store.retain(leadership=await lead(store))
    await retrying.commit()

    assert retained.dead == 0
    assert await sessions.places(task_id) == ["ready"]


# Workers


async def test_a_worker_whose_pulse_is_under_way_is_not_removed(
    store: PostgresStore, sessions: Sessions
) -> None:
    await store.register(worker_info(), lease=LEASE)
    await sessions.advance(10 * LEASE)
    leadership = await lead(store, OTHER_WORKER)
    beating = await sessions.begin()
    assert (await beating.store.pulse(Pulse(WORKER, [], LEASE, 0, False))).registered

    async with asyncio.timeout(AT_ONCE):
        assert await store.remove_dead_workers(leadership=leadership) == []
    await beating.commit()

    assert await store.remove_dead_workers(leadership=leadership) == []
    assert [worker.id for worker in await store.workers()] == [str(WORKER)]


@pytest.mark.parametrize("table", ["worker", "worker_pulse"])
async def test_a_dead_worker_whose_row_somebody_holds_keeps_none_of_the_others(
    store: PostgresStore, sessions: Sessions, table: str
) -> None:
    for worker in (WORKER, OTHER_WORKER):
        await store.register(replace(worker_info(), id=worker), lease=LEASE)
    await sessions.advance(10 * LEASE)
    leadership = await lead(store)
    key = "id" if table == "worker" else "worker_id"
    user = await sessions.begin()
    await user.connection.execute(
        f"SELECT FROM windlass.{table} WHERE {key} = $1 FOR UPDATE", WORKER
    )

    async with asyncio.timeout(AT_ONCE):
        assert await store.remove_dead_workers(leadership=leadership) == [OTHER_WORKER]
    await user.rollback()

    assert await store.remove_dead_workers(leadership=leadership) == [WORKER]


async def test_a_claim_somebody_holds_keeps_its_worker_until_it_can_be_ended(
    store: PostgresStore, sessions: Sessions
) -> None:
    """It was lost when the clock was set back: once it is removed, nobody knows that any more."""
    await store.register(worker_info(), lease=LEASE)
    await add(store)
    await claim(store)
    await sessions.advance(-100 * LEASE)
    leadership = await lead(store, OTHER_WORKER)
    user = await sessions.begin()
    await user.connection.execute("SELECT FROM windlass.claim FOR UPDATE")

    async def remove() -> list[UUID]:
        async with asyncio.timeout(AT_ONCE):
            return await store.remove_dead_workers(leadership=leadership, steady_for=3 * LEASE)

    assert await remove() == []
    assert await remove() == []
    await user.rollback()
    assert await remove() == []
    assert (await store.rescue(10)).claims == 1
    assert await remove() == [WORKER]


async def test_a_pulse_waits_for_nobody_who_holds_its_worker(
    store: PostgresStore, sessions: Sessions
) -> None:
    await store.register(worker_info(), lease=LEASE)
    await add(store)
    kept = await claim(store)
    leaving = await sessions.begin()
    await leaving.store.deregister(WORKER)

    pulse = Pulse(WORKER, [kept.token], LEASE, 0, False)
    async with asyncio.timeout(AT_ONCE):
        meanwhile = await store.pulse(pulse)
    await leaving.commit()
    after = await store.pulse(pulse)

    assert meanwhile.registered
    assert not after.registered
    assert meanwhile.kept == after.kept == {kept.token}


async def test_a_worker_that_goes_idle_waits_for_nobody_who_holds_its_row(
    store: PostgresStore, sessions: Sessions
) -> None:
    await store.register(worker_info(), lease=LEASE)
    user = await sessions.begin()
    await user.connection.execute("SELECT FROM windlass.worker_pulse FOR UPDATE")

    async with asyncio.timeout(AT_ONCE):
        await store.set_idle(WORKER, True)
    await user.commit()
    await store.pulse(Pulse(WORKER, [], LEASE, 0, True))

    assert (await store.workers())[0].idle


async def test_types_are_registered_in_sorted_order(
    store: PostgresStore, sessions: Sessions
) -> None:
    first = await sessions.begin()
    await first.store.register_types([TypeDefaults("a")])

    both = [TypeDefaults("b", priority=20), TypeDefaults("a", priority=20)]
    waiting = await sessions.blocked(store.register_types(both), by=first)

    async with asyncio.timeout(AT_ONCE):
        await store.register_types([TypeDefaults("b", priority=30)])
    await first.commit()
    await waiting
    for name in ("a", "b"):
        known = await store.type_defaults(name)
        assert known is not None
        assert known.priority == 20


async def test_a_repeated_enqueue_that_was_overtaken_by_the_end_of_its_task_adds_nothing(
    store: PostgresStore, sessions: Sessions
) -> None:
    """The first call comes through late, and its task ends, while the repetition is under way."""
    first = new_task()
    # Before it has written anything: its lane is another.
    lane = "windlass.lane_number('default', 'resize', 11::smallint, 0::smallint)"
    paused = await sessions.pause("ready", "INSERT", f"NEW.lane = {lane}")
    again = store.enqueue([first._replace(priority=11)], repeated=True)
    repeating = await sessions.blocked(again, by=paused)
    await store.enqueue([first])
    await store.settle(settlements(await claim(store), Outcome.COMPLETED))
    await paused.commit()

    assert await repeating == [Enqueued(first.id, created=True)]
    assert await sessions.places(first.id) == ["history"]


async def test_a_repeated_enqueue_with_a_key_waits_for_the_first_and_adds_nothing(
    store: PostgresStore, sessions: Sessions
) -> None:
    first = new_task(idempotency_key="k", payload='{"n": 1}')
    # The same number, written otherwise: only the repetition is to wait.
    otherwise = """NEW.fingerprint = hashtextextended('{"n": 1.0}', 0)"""
    paused = await sessions.pause("idempotency", "INSERT", otherwise)
    again = store.enqueue([first._replace(payload='{"n": 1.0}')], repeated=True)
    repeating = await sessions.blocked(again, by=paused)
    await store.enqueue([first])
    await store.settle(settlements(await claim(store), Outcome.COMPLETED))
    await paused.commit()

    assert await repeating == [Enqueued(first.id, created=True)]
    assert await sessions.places(first.id) == ["history"]
