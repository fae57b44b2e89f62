"""A settlement, a report, a child or a pulse that meets a rescue, with sessions that really wait."""

import asyncio
from datetime import timedelta
from uuid import UUID

import pytest

from contract.postgres_sessions import (
    AT_ONCE,
    LEASE,
    OTHER_WORKER,
    SECOND,
    WORKER,
    Sessions,
    add,
    claim,
    granted,
    lead,
    new_task,
    settlements,
)
from windlass.model.errors import LeaseLost, StoreBusy
from windlass.model.task import (
    Answer,
    Fence,
    Outcome,
    Pulse,
    Rescued,
    Started,
    TaskState,
)
from windlass.store.postgres.store import PostgresStore


async def test_a_rescue_leaves_a_claim_whose_settlement_is_under_way(
    store: PostgresStore, sessions: Sessions
) -> None:
    done, left = await add(store, 2)
    held = await claim(store)
    settling = await sessions.begin()
    completed = settlements(held, Outcome.COMPLETED)[:1]
    assert await settling.store.settle(completed) == [Answer.APPLIED]
    await sessions.advance(LEASE + SECOND)

    async with asyncio.timeout(AT_ONCE):
        meanwhile = await store.rescue(100)
    await settling.commit()
    afterwards = await store.rescue(100)

    assert meanwhile == Rescued()
    assert afterwards == Rescued(claims=1, returned=1)
    assert await sessions.places(done) == ["history"]
    assert await sessions.places(left) == ["ready"]


async def test_a_rescue_leaves_a_claim_whose_settlement_waits_for_somebody(
    store: PostgresStore, sessions: Sessions
) -> None:
    done, kept, left = await add(store, 3)
    held = await claim(store)
    user = await sessions.begin()
    await user.lock_task(kept)
    settling = await sessions.blocked(
        store.settle(settlements(held, Outcome.COMPLETED)[:2]), by=user
    )
    await sessions.advance(LEASE + SECOND)

    async with asyncio.timeout(AT_ONCE):
        meanwhile = await store.rescue(100)
    await user.commit()

    assert meanwhile == Rescued()
    assert await settling == [Answer.APPLIED, Answer.APPLIED]
    assert await store.rescue(100) == Rescued(claims=1, returned=1)
    assert [await sessions.places(task_id) for task_id in (done, kept, left)] == [
        ["history"],
        ["history"],
        ["ready"],
    ]


async def test_a_settlement_that_waits_for_a_rescue_finds_its_lease_lost(
    store: PostgresStore, sessions: Sessions
) -> None:
    (task_id,) = await add(store)
    held = await claim(store)
    await sessions.advance(LEASE + SECOND)
    rescuing = await sessions.begin()
    assert await rescuing.store.rescue(100) == Rescued(claims=1, returned=1)

    settling = await sessions.blocked(
        store.settle(settlements(held, Outcome.COMPLETED)), by=rescuing
    )
    await rescuing.commit()

    assert await settling == [Answer.LOST]
    assert await sessions.places(task_id) == ["ready"]
    assert (await store.get(task_id)).generation == 2


async def test_a_settlement_that_waits_for_a_rescue_that_is_undone_is_applied(
    store: PostgresStore, sessions: Sessions
) -> None:
    (task_id,) = await add(store)
    held = await claim(store)
    await sessions.advance(LEASE + SECOND)
    rescuing = await sessions.begin()
    await rescuing.store.rescue(100)

    settling = await sessions.blocked(
        store.settle(settlements(held, Outcome.COMPLETED)), by=rescuing
    )
    await rescuing.rollback()

    assert await settling == [Answer.APPLIED]
    assert await sessions.places(task_id) == ["history"]


async def test_a_claim_extended_while_the_rescue_was_on_its_way_is_kept(
    store: PostgresStore, sessions: Sessions
) -> None:
    # The rescue reads which claims have expired, then locks them a few at a time: the last of
    # these is extended between the two.
    await add(store, 12)
    claims = [await claim(store, limit=1) for _ in range(12)]
    beating = await sessions.begin()
    pulse = Pulse(WORKER, [claims[-1].token], timedelta(hours=1), 0, False)
    assert (await beating.store.pulse(pulse)).kept == {claims[-1].token}
    await sessions.advance(LEASE + SECOND)
    first = claims[0].tasks[0].id
    pause = await sessions.pause("task", "UPDATE", f"OLD.id = '{first}'")

    rescuing = await sessions.blocked(store.rescue(100), by=pause)
    await beating.commit()
    await pause.commit()

    assert await rescuing == Rescued(claims=11, returned=11)
    assert await sessions.places(claims[-1].tasks[0].id) == ["claim"]
    assert await store.settle(settlements(claims[-1], Outcome.COMPLETED)) == [Answer.APPLIED]


async def test_a_rescue_does_not_wait_for_a_task_that_somebody_holds(
    store: PostgresStore, sessions: Sessions
) -> None:
    (kept,) = await add(store)
    await claim(store)
    (free,) = await add(store)
    await claim(store)
    await sessions.advance(LEASE + SECOND)
    user = await sessions.begin()
    await user.lock_task(kept)

    async with asyncio.timeout(AT_ONCE):
        assert await store.rescue(100) == Rescued(claims=1, returned=1)

    assert await sessions.places(free) == ["ready"]
    await user.rollback()
    await store.rescue(100)
    assert await sessions.places(kept) == ["ready"]


@pytest.mark.parametrize(
    "rows",
    [
        "windlass.claim_task WHERE token = $1",
        "windlass.running WHERE token = $1",
        "windlass.attempt WHERE $1::uuid IS NOT NULL",
        "windlass.cancel_request WHERE $1::uuid IS NOT NULL",
    ],
)
async def test_a_rescue_goes_round_a_claim_of_which_somebody_holds_another_row(
    store: PostgresStore, sessions: Sessions, rows: str
) -> None:
    (kept,) = await add(store)
    await store.settle(settlements(await claim(store), Outcome.RETRIED))
    held = await claim(store)
    (task,) = held.tasks
    await store.start([Started(held.token, task.id, task.generation, 0.0)])
    await store.cancel(kept, "no longer wanted")
    (free,) = await add(store)
    await claim(store)
    await sessions.advance(LEASE + SECOND)
    user = await sessions.begin()
    locked = await user.connection.fetch(f"SELECT FROM {rows} FOR UPDATE", held.token)
    assert len(locked) == 1

    assert await store.rescue(100) == Rescued(claims=1, returned=1)

    assert await sessions.places(free) == ["ready"]
    assert (await store.get(kept)).status is TaskState.RUNNING
    await user.rollback()
    assert await store.rescue(100) == Rescued(claims=1, cancelled=1)


async def test_a_task_that_somebody_holds_keeps_none_of_its_claim(
    store: PostgresStore, sessions: Sessions
) -> None:
    kept, free = await add(store, 2)
    await claim(store)
    await sessions.advance(LEASE + SECOND)
    user = await sessions.begin()
    await user.lock_task(kept)

    assert await store.rescue(100) == Rescued(claims=1, returned=1)

    assert await sessions.places(free) == ["ready"]
    assert await sessions.places(kept) == ["claim"]
    await user.rollback()
    assert await store.rescue(100) == Rescued(claims=1, returned=1)


async def test_many_claims_that_are_held_neither_hide_the_others_nor_add_up(
    store: PostgresStore, sessions: Sessions
) -> None:
    for _ in range(60):
        await add(store)
        held = await claim(store)
        await store.start([Started(held.token, held.tasks[0].id, 1, 0.0)])
    (free,) = await add(store)
    await claim(store)
    await sessions.advance(LEASE + SECOND)
    user = await sessions.begin()
    await user.connection.execute("SELECT FROM windlass.running FOR UPDATE")

    async with asyncio.timeout(AT_ONCE):
        assert await store.rescue(10) == Rescued(claims=1, returned=1)

    assert await sessions.places(free) == ["ready"]


@pytest.mark.parametrize("claimed_again", [False, True])
async def test_a_rescue_of_a_half_settled_batch_leaves_the_task_that_came_back_to_its_next_owner(
    store: PostgresStore, sessions: Sessions, claimed_again: bool
) -> None:
    retried, left = await add(store, 2)
    first = await claim(store)
    assert await store.settle(settlements(first, Outcome.RETRIED)[:1]) == [Answer.APPLIED]
    if claimed_again:
        next_claim = await claim(store, worker=OTHER_WORKER, lease=10 * LEASE)
        assert [task.id for task in next_claim.tasks] == [retried]
    await sessions.advance(LEASE + SECOND)

    rescued = await store.rescue(100)

    assert rescued == Rescued(claims=1, returned=1)
    assert await sessions.places(left) == ["ready"]
    record = await store.get(retried)
    assert (record.generation, record.attempts) == (2, 1)
    if claimed_again:
        assert await sessions.places(retried) == ["claim"]
        answers = await store.settle(settlements(next_claim, Outcome.COMPLETED))
        assert answers == [Answer.APPLIED]
    else:
        assert await sessions.places(retried) == ["ready"]


async def test_a_rescue_keeps_away_from_a_task_that_is_being_reported_as_running(
    store: PostgresStore, sessions: Sessions
) -> None:
    await add(store)
    held = await claim(store)
    (task,) = held.tasks
    reporting = await sessions.begin()
    assert not await reporting.store.start([Started(held.token, task.id, task.generation, 0.0)])
    await sessions.advance(LEASE + SECOND)

    async with asyncio.timeout(AT_ONCE):
        assert await store.rescue(100) == Rescued()
    await reporting.commit()
    assert await store.rescue(100) == Rescued(claims=1, returned=1, lost_attempts=1)


async def test_a_report_of_running_that_waits_for_a_rescue_is_told_of_the_loss(
    store: PostgresStore, sessions: Sessions
) -> None:
    await add(store)
    held = await claim(store)
    (task,) = held.tasks
    await sessions.advance(LEASE + SECOND)
    rescuing = await sessions.begin()
    await rescuing.store.rescue(100)

    started = [Started(held.token, task.id, task.generation, 0.0)]
    reporting = await sessions.blocked(store.start(started), by=rescuing)
    await rescuing.commit()

    assert await reporting == {task.id}
    assert (await store.get(UUID(str(task.id)))).status is TaskState.PENDING


async def test_a_report_of_running_that_may_not_wait_any_longer_says_so(
    store: PostgresStore, sessions: Sessions
) -> None:
    hasty = await sessions.open_store(patience=timedelta(milliseconds=100))
    await add(store)
    held = await claim(store)
    started = [Started(held.token, held.tasks[0].id, 1, 0.0)]
    user = await sessions.begin()
    await user.connection.execute("SELECT FROM windlass.claim FOR UPDATE")

    with pytest.raises(StoreBusy):
        await hasty.start(started)

    await user.commit()
    assert not await hasty.start(started)


async def test_a_report_of_an_earlier_generation_uses_no_attempt_of_the_next(
    store: PostgresStore, sessions: Sessions
) -> None:
    (task_id,) = await add(store)
    first = await claim(store)
    reporting = await sessions.begin()
    await reporting.store.start([Started(first.token, task_id, 1, 0.0)])
    assert await store.settle(settlements(first, Outcome.SNOOZED)) == [Answer.APPLIED]
    await reporting.commit()  # a row that was overtaken by the end of its attempt
    assert (await claim(store)).tasks[0].generation == 2
    await sessions.advance(LEASE + SECOND)

    rescued = await store.rescue(100)

    assert (rescued.returned, rescued.lost_attempts) == (1, 0)
    assert (await store.get(task_id)).attempts == 0


async def test_a_report_of_running_that_is_overtaken_by_the_end_leaves_nothing_behind(
    store: PostgresStore, sessions: Sessions
) -> None:
    await add(store, 2)
    held = await claim(store)
    task, _ = held.tasks
    reporting = await sessions.begin()
    await reporting.store.start([Started(held.token, task.id, task.generation, 0.0)])

    ended = await store.settle(settlements(held, Outcome.COMPLETED, reported=True)[:1])
    await reporting.commit()
    await store.settle(settlements(held, Outcome.COMPLETED)[1:])
    await store.tidy(leadership=await lead(store))

    assert ended == [Answer.APPLIED]
    assert await sessions.watcher.fetchval("SELECT count(*) FROM windlass.running") == 0


async def test_a_child_enqueued_under_a_fence_keeps_the_rescue_away_until_it_is_committed(
    store: PostgresStore, sessions: Sessions
) -> None:
    await add(store)
    held = await claim(store)
    (task,) = held.tasks
    handler = await sessions.begin()
    fence = Fence(held.token, task.id, task.generation)
    (child,) = await handler.store.enqueue([new_task(type="child")], fence=fence)
    await sessions.advance(LEASE + SECOND)

    async with asyncio.timeout(AT_ONCE):
        assert await store.rescue(100) == Rescued()
    await handler.commit()
    assert await store.rescue(100) == Rescued(claims=1, returned=1)
    assert await granted(store, of="child") == [child.id]


async def test_a_settlement_does_not_wait_for_a_child_that_is_being_enqueued(
    store: PostgresStore, sessions: Sessions
) -> None:
    (task_id,) = await add(store)
    held = await claim(store)
    handler = await sessions.begin()
    fence = Fence(held.token, task_id, 1)
    (child,) = await handler.store.enqueue([new_task(type="child")], fence=fence)

    async with asyncio.timeout(AT_ONCE):
        assert await store.settle(settlements(held, Outcome.COMPLETED)) == [Answer.APPLIED]
    await handler.commit()

    assert await granted(store, of="child") == [child.id]
    # The claim could not be removed while the child's transaction held it: a sweep does.
    await sessions.advance(LEASE + SECOND)
    rescued = await store.rescue(100)
    assert (rescued.lost_attempts, rescued.dead, rescued.cancelled) == (0, 0, 0)
    assert await sessions.places(task_id) == ["history"]
    gone = "SELECT count(*) FROM windlass.claim WHERE token = $1"
    assert await sessions.watcher.fetchval(gone, held.token) == 0


async def test_a_child_whose_fence_waits_for_a_rescue_is_refused(
    store: PostgresStore, sessions: Sessions
) -> None:
    await add(store)
    held = await claim(store)
    (task,) = held.tasks
    await sessions.advance(LEASE + SECOND)
    rescuing = await sessions.begin()
    await rescuing.store.rescue(100)

    fence = Fence(held.token, task.id, task.generation)
    enqueueing = await sessions.blocked(
        store.enqueue([new_task(type="child")], fence=fence), by=rescuing
    )
    await rescuing.commit()

    with pytest.raises(LeaseLost):
        await enqueueing
    assert await granted(store, of="child") == []
