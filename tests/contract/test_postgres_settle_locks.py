"""Settlements and pulses that meet each other, with sessions that really wait."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

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
    settlements,
)
from windlass.model.errors import (
    StoreBusy,
)
from windlass.model.task import (
    Answer,
    Outcome,
    Pulse,
    Rescued,
    Started,
)
from windlass.store.postgres.store import PostgresStore

# Settle against settle and retry


async def test_a_repeated_settlement_does_not_hit_the_next_owner(
    store: PostgresStore, sessions: Sessions
) -> None:
    await add(store, 2)
    first = await claim(store)
    retried = settlements(first, Outcome.RETRIED)[:1]
    assert await store.settle(retried) == [Answer.APPLIED]
    second = await claim(store, worker=OTHER_WORKER)
    task_id = second.tasks[0].id
    assert task_id == first.tasks[0].id

    completed = settlements(first, Outcome.COMPLETED)[:1]
    dead = settlements(first, Outcome.DEAD)[:1]
    repeated = [await store.settle(again) for again in (retried, completed, dead)]

    # The token of the claim is still there for its other task: only the generation tells.
    assert repeated == [[Answer.ALREADY]] * 3
    assert await sessions.places(task_id) == ["claim"]
    assert (await store.get(task_id)).generation == 2
    assert await store.settle(settlements(second, Outcome.COMPLETED)) == [Answer.APPLIED]
    assert await store.settle(retried) == [Answer.LOST]
    assert await sessions.places(task_id) == ["history"]


async def test_a_settlement_that_waits_for_the_same_one_changes_nothing(
    store: PostgresStore, sessions: Sessions
) -> None:
    retried, _ = await add(store, 2)
    held = await claim(store)
    settling = await sessions.begin()
    once = settlements(held, Outcome.RETRIED)[:1]
    assert await settling.store.settle(once) == [Answer.APPLIED]

    repeating = await sessions.blocked(store.settle(once), by=settling)
    await settling.commit()

    assert await repeating == [Answer.ALREADY]
    assert await sessions.places(retried) == ["ready"]
    assert (await store.get(retried)).attempts == 1


async def test_a_settlement_repeated_while_the_first_empties_its_claim_does_not_deadlock(
    store: PostgresStore, sessions: Sessions
) -> None:
    (task_id,) = await add(store)
    once = settlements(await claim(store), Outcome.COMPLETED)
    pause = await sessions.pause("history", "INSERT")
    first = await sessions.blocked(store.settle(once), by=pause)
    first_pid = await sessions.watcher.fetchval(
        "SELECT pid FROM pg_stat_activity WHERE $1 = ANY (pg_blocking_pids(pid))", pause.pid
    )
    second = await sessions.blocked(store.settle(once), by=first_pid)

    await pause.commit()
    answers = list(await asyncio.gather(first, second, return_exceptions=True))

    assert answers == [[Answer.APPLIED], [Answer.ALREADY]]
    assert await sessions.places(task_id) == ["history"]


async def test_settlements_of_one_claim_count_it_down_together(
    store: PostgresStore, sessions: Sessions
) -> None:
    await add(store, 3)
    first, second, third = settlements(held := await claim(store), Outcome.COMPLETED)
    settling = await sessions.begin()
    assert await settling.store.settle([first]) == [Answer.APPLIED]

    other = await sessions.blocked(store.settle([second]), by=settling)
    await settling.commit()
    assert await other == [Answer.APPLIED]

    remaining = "SELECT remaining FROM windlass.claim WHERE token = $1"
    assert await sessions.watcher.fetchval(remaining, held.token) == 1
    assert await store.settle([third]) == [Answer.APPLIED]
    assert await sessions.watcher.fetchval(remaining, held.token) is None
    assert await sessions.watcher.fetchval("SELECT count(*) FROM windlass.claim_task") == 0


async def test_a_settlement_that_may_not_wait_any_longer_does_nothing_by_halves(
    store: PostgresStore, sessions: Sessions
) -> None:
    hasty = await sessions.open_store(patience=timedelta(milliseconds=100))
    free, kept = await add(store, 2)
    held = await claim(store)
    both = settlements(held, Outcome.COMPLETED)
    user = await sessions.begin()
    await user.lock_task(kept)

    with pytest.raises(StoreBusy):
        await hasty.settle(both)

    assert await sessions.places(free) == ["claim"]
    assert await sessions.places(kept) == ["claim"]
    assert await sessions.watcher.fetchval("SELECT remaining FROM windlass.claim") == 2
    assert await hasty.settle(both[:1]) == [Answer.APPLIED]
    await user.commit()
    assert await hasty.settle(both) == [Answer.ALREADY, Answer.APPLIED]
    assert await sessions.watcher.fetchval("SELECT count(*) FROM windlass.claim") == 0


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("SELECT FROM windlass.task WHERE id = $1 FOR UPDATE", [True, False]),
        ("SELECT FROM windlass.task WHERE id = $1 FOR SHARE", [True, False]),
        ("SELECT FROM windlass.claim WHERE $1::uuid IS NOT NULL FOR UPDATE", [True, True]),
        ("SELECT FROM windlass.claim_task WHERE $1::uuid IS NOT NULL FOR UPDATE", [True, True]),
        ("SELECT FROM windlass.running WHERE task_id = $1 FOR UPDATE", [True, False]),
        ("SELECT FROM windlass.attempt WHERE task_id = $1 FOR UPDATE", [True, False]),
        ("SELECT FROM windlass.cancel_request WHERE task_id = $1 FOR UPDATE", [True, False]),
        ("SELECT FROM windlass.ready WHERE task_id = $1 FOR UPDATE", [False, False]),
    ],
)
async def test_what_a_settlement_would_wait_for_is_told_without_waiting(
    store: PostgresStore, sessions: Sessions, statement: str, expected: list[bool]
) -> None:
    await add(store, 2)
    await store.settle(settlements(await claim(store), Outcome.RETRIED))
    held = settlements(await claim(store), Outcome.COMPLETED, reported=True)
    await store.start([Started(one.token, one.task_id, one.generation, 0.0) for one in held])
    for one in held:
        await store.cancel(one.task_id, "enough")
    user = await sessions.begin()
    await user.connection.execute(statement, held[0].task_id)

    async with asyncio.timeout(AT_ONCE):
        assert await store.held(held) == expected
    await user.rollback()

    assert await store.held(held) == [False, False]
    assert await store.settle(held) == [Answer.APPLIED, Answer.APPLIED]
    assert await store.held(held) == [False, False]


async def test_a_settlement_under_way_counts_as_no_holder_until_it_counts_down(
    store: PostgresStore, sessions: Sessions
) -> None:
    await add(store, 2)
    first, second = settlements(await claim(store), Outcome.COMPLETED)
    user = await sessions.begin()
    await user.lock_task(first.task_id)
    settling = await sessions.blocked(store.settle([first]), by=user)

    assert await store.held([first, second]) == [True, False]
    await user.rollback()
    assert await settling == [Answer.APPLIED]


# Pulse


async def test_a_pulse_goes_on_while_a_settlement_waits(
    store: PostgresStore, sessions: Sessions
) -> None:
    (task_id,) = await add(store)
    held = await claim(store)
    user = await sessions.begin()
    await user.lock_task(task_id)
    settling = await sessions.blocked(store.settle(settlements(held, Outcome.COMPLETED)), by=user)
    expiry = "SELECT expires_at - claimed_at FROM windlass.claim"
    assert await sessions.watcher.fetchval(expiry) == LEASE

    async with asyncio.timeout(AT_ONCE):
        answer = await store.pulse(Pulse(WORKER, [held.token], 10 * LEASE, 1, False))

    assert answer.kept == {held.token}
    assert await sessions.watcher.fetchval(expiry) >= 10 * LEASE
    assert not settling.done()
    await user.commit()
    assert await settling == [Answer.APPLIED]


async def test_a_pulse_skips_the_claim_that_somebody_holds_and_keeps_the_others(
    store: PostgresStore, sessions: Sessions
) -> None:
    await add(store, 2)
    held, free = await claim(store, limit=1), await claim(store, limit=1)
    user = await sessions.begin()
    await user.connection.execute(
        "SELECT FROM windlass.claim WHERE token = $1 FOR NO KEY UPDATE", held.token
    )

    async with asyncio.timeout(AT_ONCE):
        answer = await store.pulse(Pulse(WORKER, [held.token, free.token], 10 * LEASE, 1, False))

    assert answer.kept == {free.token}
    assert answer.skipped == {held.token}
    expiry = "SELECT expires_at - claimed_at FROM windlass.claim WHERE token = $1"
    assert await sessions.watcher.fetchval(expiry, held.token) == LEASE
    assert await sessions.watcher.fetchval(expiry, free.token) >= 10 * LEASE
    await user.commit()
    again = await store.pulse(Pulse(WORKER, [held.token], 10 * LEASE, 1, False))
    assert again.kept == {held.token}
    assert not again.skipped


async def test_a_patient_pulse_waits_and_gives_the_whole_lease_from_after_the_wait(
    store: PostgresStore, sessions: Sessions
) -> None:
    await add(store)
    held = await claim(store)
    holder = await sessions.begin()
    await holder.connection.execute("SELECT FROM windlass.claim FOR NO KEY UPDATE")

    pulse = Pulse(WORKER, [held.token], LEASE, 0, False, patience=timedelta(minutes=1))
    beating = await sessions.blocked(store.pulse(pulse), by=holder)
    released_at = await sessions.watcher.fetchval("SELECT clock_timestamp()")
    await holder.commit()

    assert (await beating).kept == {held.token}
    expires_at = await sessions.watcher.fetchval("SELECT expires_at FROM windlass.claim")
    assert expires_at >= released_at + LEASE


async def test_a_patient_pulse_skips_the_claim_that_is_held_for_longer(
    store: PostgresStore, sessions: Sessions
) -> None:
    await add(store)
    held = await claim(store)
    user = await sessions.begin()
    await user.connection.execute("SELECT FROM windlass.claim FOR NO KEY UPDATE")

    pulse = Pulse(WORKER, [held.token], LEASE, 0, False, patience=timedelta(milliseconds=50))
    async with asyncio.timeout(AT_ONCE):
        answer = await store.pulse(pulse)

    assert answer.skipped == {held.token}
    assert answer.registered


async def test_a_patient_pulse_that_waits_for_a_rescue_keeps_nothing(
    store: PostgresStore, sessions: Sessions
) -> None:
    await add(store)
    lost = await claim(store)
    rescuing = await sessions.begin()
    await sessions.advance(LEASE + SECOND)
    assert await rescuing.store.rescue(100) == Rescued(claims=1, returned=1)
    await sessions.advance(timedelta(0))  # the pulse finds the claim unexpired when it looks

    pulse = Pulse(WORKER, [lost.token], LEASE, 0, False, patience=timedelta(minutes=1))
    beating = await sessions.blocked(store.pulse(pulse), by=rescuing)
    await rescuing.commit()

    answer = await beating
    assert not answer.kept
    assert not answer.skipped


async def test_a_claim_that_seems_expired_and_somebody_holds_is_not_lost_for_who_knows_better(
    store: PostgresStore, sessions: Sessions
) -> None:
    """The clock was set ahead during its lease: the worker asks again."""
    await add(store)
    held = await claim(store)
    user = await sessions.begin()
    await user.connection.execute("SELECT FROM windlass.claim FOR NO KEY UPDATE")
    await sessions.advance(LEASE + SECOND)

    async with asyncio.timeout(AT_ONCE):
        answer = await store.pulse(Pulse(WORKER, [held.token], LEASE, 1, False, trusted=True))

    assert answer.skipped == {held.token}


async def test_an_expired_claim_that_somebody_holds_is_lost_and_not_skipped(
    store: PostgresStore, sessions: Sessions
) -> None:
    await add(store)
    held = await claim(store)
    user = await sessions.begin()
    await user.connection.execute("SELECT FROM windlass.claim FOR NO KEY UPDATE")
    await sessions.advance(LEASE + SECOND)

    async with asyncio.timeout(AT_ONCE):
        answer = await store.pulse(Pulse(WORKER, [held.token], LEASE, 1, False))

    assert not answer.kept
    assert not answer.skipped


async def test_a_pulse_that_meets_a_rescue_keeps_nothing_of_it(
    store: PostgresStore, sessions: Sessions
) -> None:
    await add(store, 2)
    lost = await claim(store, limit=1)
    kept = await claim(store, limit=1, lease=10 * LEASE)
    rescuing = await sessions.begin()
    await sessions.advance(LEASE + SECOND)
    assert await rescuing.store.rescue(100) == Rescued(claims=1, returned=1)
    await sessions.advance(timedelta(0))  # the pulse finds the claim unexpired when it looks

    pulse = Pulse(WORKER, [lost.token, kept.token], LEASE, 0, False)
    meanwhile = await store.pulse(pulse)
    await rescuing.commit()
    after = await store.pulse(pulse)

    assert meanwhile.kept == after.kept == {kept.token}
    assert meanwhile.skipped == {lost.token}
    assert not after.skipped


@pytest.mark.parametrize("method", ["settle", "start"])
async def test_claims_are_locked_in_sorted_order(
    store: PostgresStore, sessions: Sessions, method: str
) -> None:
    await add(store, 2)
    claims = [await claim(store, limit=1), await claim(store, limit=1)]
    claims.sort(key=lambda held: held.token, reverse=True)
    last, first = claims
    holder = await sessions.begin()
    await holder.connection.execute(
        "SELECT FROM windlass.claim WHERE token = $1 FOR UPDATE", first.token
    )
    calls: dict[str, Callable[[], Awaitable[Any]]] = {
        "settle": lambda: store.settle(
            [one for held in claims for one in settlements(held, Outcome.COMPLETED)]
        ),
        "start": lambda: store.start(
            [Started(held.token, held.tasks[0].id, 1, 0.0) for held in claims]
        ),
    }

    waiting = await sessions.blocked(calls[method](), by=holder)

    # Whoever waits for the first one must not hold the last one yet.
    await sessions.watcher.execute(
        "SELECT FROM windlass.claim WHERE token = $1 FOR UPDATE NOWAIT", last.token
    )
    await holder.commit()
    await waiting


async def test_a_settlement_counts_its_claims_down_in_sorted_order(
    store: PostgresStore, sessions: Sessions
) -> None:
    await add(store, 4)
    claims = [await claim(store, limit=2), await claim(store, limit=2)]
    first, last = sorted(claims, key=lambda held: held.token)
    beating = await sessions.begin()
    await beating.store.pulse(Pulse(WORKER, [first.token], LEASE, 0, False))

    one_each = [settlements(held, Outcome.COMPLETED)[0] for held in (last, first)]
    settling = await sessions.blocked(store.settle(one_each), by=beating)

    await sessions.watcher.execute(
        "SELECT FROM windlass.claim WHERE token = $1 FOR NO KEY UPDATE NOWAIT", last.token
    )
    await beating.commit()
    assert await settling == [Answer.APPLIED, Answer.APPLIED]


async def test_pulses_and_settlements_over_two_claims_never_deadlock(
    store: PostgresStore, sessions: Sessions
) -> None:
    rounds = 300
    beside = await sessions.open_store(pool_size=1)
    await add(store, 2 * rounds)
    claims = [await claim(store, limit=rounds), await claim(store, limit=rounds)]
    tokens = [held.token for held in claims]
    ends = [settlements(held, Outcome.COMPLETED) for held in claims]

    async def beat_until(done: asyncio.Event) -> int:
        beats = 0
        while not done.is_set():
            tokens.reverse()
            await beside.pulse(Pulse(WORKER, list(tokens), LEASE, 0, False))
            beats += 1
        return beats

    async def settle_all(done: asyncio.Event) -> None:
        for turn in range(rounds):
            ends.reverse()
            assert await store.settle([end[turn] for end in ends]) == [Answer.APPLIED] * 2
        done.set()

    done = asyncio.Event()
    async with asyncio.TaskGroup() as both:
        beating = both.create_task(beat_until(done))
        both.create_task(settle_all(done))

    deadlocks = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
    assert await sessions.watcher.fetchval(deadlocks) == 0
    assert beating.result() > rounds / 10


# What a settlement and a claim do beside


async def test_a_first_attempt_that_was_reported_leaves_no_report(
    store: PostgresStore, sessions: Sessions
) -> None:
    await add(store, 2)
    held = settlements(await claim(store), Outcome.COMPLETED, reported=True)
    await store.start([Started(one.token, one.task_id, one.generation, 0.0) for one in held])

    await store.settle(held)

    assert await sessions.watcher.fetch("SELECT FROM windlass.running") == []


async def test_a_claim_says_of_which_tasks_the_cancellation_was_asked_for(
    store: PostgresStore, sessions: Sessions
) -> None:
    first, second = await add(store, 2)
    await sessions.watcher.execute(
        "INSERT INTO windlass.cancel_request VALUES ($1, 'enough', now())", second
    )

    granted = await claim(store)

    assert {task.id: task.cancel_reason for task in granted.tasks} == {
        first: None,
        second: "enough",
    }
