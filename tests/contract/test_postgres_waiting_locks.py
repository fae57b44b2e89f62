"""A waiting task that two sessions reach for: claim, cancel, change, promotion."""

import asyncio
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest

from contract.postgres_sessions import (
    AT_ONCE,
    Sessions,
    add,
    claim,
    granted,
    lead,
    look_behind_twice,
    settlements,
)
from windlass.model.errors import StoreBusy, WrongState
from windlass.model.task import (
    Answer,
    CancelAnswer,
    Change,
    Outcome,
    TaskState,
)
from windlass.store.postgres.store import PostgresStore

# Claim against cancel and change


@pytest.mark.parametrize("undone", [False, True])
async def test_a_claim_skips_a_task_that_is_being_cancelled(
    store: PostgresStore, sessions: Sessions, undone: bool
) -> None:
    task_id, other = await add(store, 2)
    cancelling = await sessions.begin()
    assert await cancelling.store.cancel(task_id, "no need") is CancelAnswer.CANCELLED

    async with asyncio.timeout(AT_ONCE):
        assert await granted(store) == [other]
    await (cancelling.rollback() if undone else cancelling.commit())
    await look_behind_twice(store)

    assert await granted(store) == ([task_id] if undone else [])
    assert await sessions.places(task_id) == (["claim"] if undone else ["history"])


async def test_a_cancel_that_waits_for_a_claim_ends_as_a_request(
    store: PostgresStore, sessions: Sessions
) -> None:
    (task_id,) = await add(store)
    claiming = await sessions.begin()
    held = await claim(claiming.store)

    cancelling = await sessions.blocked(store.cancel(task_id, "no need"), by=claiming)
    await claiming.commit()

    assert await cancelling is CancelAnswer.REQUESTED
    assert await store.requested_cancellations([task_id]) == {task_id: "no need"}
    assert await sessions.places(task_id) == ["claim"]
    assert await store.settle(settlements(held, Outcome.RELEASED)) == [Answer.APPLIED]
    assert await sessions.places(task_id) == ["history"]


async def test_a_cancel_that_waits_for_a_claim_that_is_undone_cancels(
    store: PostgresStore, sessions: Sessions
) -> None:
    (task_id,) = await add(store)
    claiming = await sessions.begin()
    await claim(claiming.store)

    cancelling = await sessions.blocked(store.cancel(task_id, "no need"), by=claiming)
    await claiming.rollback()

    assert await cancelling is CancelAnswer.CANCELLED
    assert await sessions.places(task_id) == ["history"]
    assert await granted(store) == []


async def test_a_claim_skips_a_task_that_is_being_changed_and_finds_it_where_it_went(
    store: PostgresStore, sessions: Sessions
) -> None:
    (task_id,) = await add(store)
    changing = await sessions.begin()
    await changing.store.change(task_id, Change(priority=50, queue="fast"))

    async with asyncio.timeout(AT_ONCE):
        assert await granted(store) == []
    await changing.commit()

    assert await granted(store) == [task_id]


async def test_a_change_that_waits_for_a_claim_is_refused(
    store: PostgresStore, sessions: Sessions
) -> None:
    (task_id,) = await add(store)
    claiming = await sessions.begin()
    await claim(claiming.store)

    changing = await sessions.blocked(store.change(task_id, Change(priority=50)), by=claiming)
    await claiming.commit()

    with pytest.raises(WrongState):
        await changing
    assert (await store.get(task_id)).priority == 10


async def test_a_cancel_waits_for_no_settlement_of_the_claimed_task(
    store: PostgresStore, sessions: Sessions
) -> None:
    (task_id,) = await add(store)
    held = await claim(store)
    settling = await sessions.begin()
    await settling.store.settle(settlements(held, Outcome.RETRIED))

    async with asyncio.timeout(AT_ONCE):
        assert await store.cancel(task_id, "no need") is CancelAnswer.REQUESTED
    await settling.commit()
    await store.tidy(leadership=await lead(store))

    # It came back although its cancellation was asked for: the leader finishes the request.
    assert await sessions.places(task_id) == ["history"]


@pytest.mark.parametrize("undone", [False, True])
@pytest.mark.parametrize(
    ("before", "change"),
    [
        ({}, Change(delay=3600.0)),
        ({"delay": 3600.0}, Change(delay=0.0)),
        ({}, Change(priority=50)),
    ],
)
async def test_a_cancel_that_waits_for_a_change_finds_the_task_where_it_went(
    store: PostgresStore,
    sessions: Sessions,
    before: dict[str, Any],
    change: Change,
    undone: bool,
) -> None:
    (task_id,) = await add(store, **before)
    changing = await sessions.begin()
    await changing.store.change(task_id, change)

    cancelling = await sessions.blocked(store.cancel(task_id, "no need"), by=changing)
    await (changing.rollback() if undone else changing.commit())

    assert await cancelling is CancelAnswer.CANCELLED
    assert await sessions.places(task_id) == ["history"]


@pytest.mark.parametrize("verb", ["cancel", "change"])
async def test_whoever_meets_a_task_that_is_held_for_long_is_told_which(
    store: PostgresStore, sessions: Sessions, verb: str
) -> None:
    (task_id,) = await add(store)
    holding = await sessions.begin()
    await holding.store.change(task_id, Change(priority=50))

    call = (
        store.cancel(task_id, "no need")
        if verb == "cancel"
        else store.change(task_id, Change(priority=60))
    )
    with pytest.raises(StoreBusy, match=f"task {task_id} is held by a transaction"):
        await call
    assert (await store.get(task_id)).status is TaskState.PENDING


@pytest.mark.parametrize("undone", [False, True])
async def test_of_two_cancels_the_second_waits_and_answers_by_what_became_of_the_first(
    store: PostgresStore, sessions: Sessions, undone: bool
) -> None:
    (task_id,) = await add(store)
    first = await sessions.begin()
    await first.store.cancel(task_id, "first")

    second = await sessions.blocked(store.cancel(task_id, "second"), by=first)
    await (first.rollback() if undone else first.commit())

    assert await second is (CancelAnswer.CANCELLED if undone else CancelAnswer.ENDED)
    assert (await store.get(task_id)).last_error == ("second" if undone else "first")


# Many at once


@pytest.mark.parametrize("undone", [False, True])
@pytest.mark.parametrize("holds", ["cancel", "change", "claim", "promotion", "row"])
async def test_of_many_what_somebody_holds_is_gone_round_and_found_later(
    store: PostgresStore, sessions: Sessions, holds: str, undone: bool
) -> None:
    delay = 60.0 if holds == "promotion" else 0.0
    (task_id,) = await add(store, delay=delay)
    await sessions.advance(timedelta(seconds=61))
    holding = await sessions.begin()
    match holds:
        case "cancel" | "change":
            await take(holding.store, task_id, holds)
        case "claim":
            await claim(holding.store)
        case "promotion":
            assert await holding.store.promote(100) == 1
        case _:
            await holding.lock_task(task_id)
    others = [*await add(store, 2), *await add(store, delay=60.0)]

    async with asyncio.timeout(AT_ONCE):
        answers = await store.cancel_many([others[0], task_id, *others[1:]], "no need")

    assert answers == [CancelAnswer.CANCELLED, CancelAnswer.HELD, *[CancelAnswer.CANCELLED] * 2]
    assert [await sessions.places(other) for other in others] == [["history"]] * 3
    await (holding.rollback() if undone else holding.commit())
    (answer,) = await store.cancel_many([task_id], "no need")
    expected = {"claim": CancelAnswer.REQUESTED, "cancel": CancelAnswer.ENDED}
    assert answer is (CancelAnswer.CANCELLED if undone else expected.get(holds, answer.CANCELLED))


@pytest.mark.parametrize("undone", [False, True])
async def test_of_many_one_that_somebody_asks_to_cancel_keeps_no_other(
    store: PostgresStore, sessions: Sessions, undone: bool
) -> None:
    asked, other = await add(store, 2)
    await claim(store)
    (waiting,) = await add(store)
    asking = await sessions.begin()
    await asking.store.cancel(asked, "first")

    async with asyncio.timeout(AT_ONCE):
        answers = await store.cancel_many([asked, other, waiting], "second")

    assert answers == [CancelAnswer.HELD, CancelAnswer.REQUESTED, CancelAnswer.CANCELLED]
    await (asking.rollback() if undone else asking.commit())
    assert await store.cancel_many([asked], "second") == [CancelAnswer.REQUESTED]
    reasons = {asked: "second" if undone else "first", other: "second"}
    assert await store.requested_cancellations([asked, other, waiting]) == reasons


async def test_of_many_only_those_are_held_that_somebody_asks_to_cancel(
    store: PostgresStore, sessions: Sessions
) -> None:
    ids = await add(store, 40)
    await claim(store, limit=40)
    asking = await sessions.begin()
    for task_id in ids[:15]:
        await asking.store.cancel(task_id, "first")

    async with asyncio.timeout(AT_ONCE):
        answers = await store.cancel_many(ids, "second")

    assert answers == [CancelAnswer.HELD] * 15 + [CancelAnswer.REQUESTED] * 25


@pytest.mark.parametrize("verb", ["cancel", "cancel_many", "bury_scheduled", "expire"])
async def test_nothing_is_left_of_a_task_that_ends_while_it_waits(
    store: PostgresStore, sessions: Sessions, verb: str
) -> None:
    (task_id,) = await add(store, expires=60.0)
    await store.settle(settlements(await claim(store), Outcome.RETRIED, delay=3600.0))
    await sessions.watcher.execute(
        "INSERT INTO windlass.cancel_request (task_id, reason, requested_at) VALUES ($1, '', now())",
        task_id,
    )
    if verb == "cancel":
        await store.cancel(task_id, "no need")
    elif verb == "cancel_many":
        await store.cancel_many([task_id], "no need")
    elif verb == "bury_scheduled":
        await store.stop_retries("resize", "stop")
        await store.bury_scheduled("resize", 10)
    else:
        await sessions.watcher.execute("UPDATE windlass.task SET attempts = 0")
        await sessions.advance(timedelta(seconds=61))
        await store.expire(10, leadership=await lead(store))

    assert await sessions.places(task_id) == ["dead" if verb == "bury_scheduled" else "history"]
    for table in ("attempt", "cancel_request"):
        assert await sessions.watcher.fetchval(f"SELECT count(*) FROM windlass.{table}") == 0


async def test_of_many_one_that_moves_meanwhile_is_known_and_to_be_asked_for_again(
    store: PostgresStore, sessions: Sessions
) -> None:
    (claimed,) = await add(store)
    await claim(store)
    (moving,) = await add(store, delay=60.0)
    await sessions.advance(timedelta(seconds=61))
    pause = await sessions.pause("cancel_request", "INSERT")

    call = store.cancel_many([claimed, moving], "no need")
    cancelling = await sessions.blocked(call, by=pause)
    assert await store.promote(100) == 1
    assert await granted(store) == [moving]
    await pause.commit()

    assert await cancelling == [CancelAnswer.REQUESTED, CancelAnswer.HELD]
    assert await store.cancel_many([moving], "no need") == [CancelAnswer.REQUESTED]


@pytest.mark.parametrize("number", [1, 2])
async def test_a_request_for_one_of_many_is_not_for_a_later_generation(
    store: PostgresStore, sessions: Sessions, number: int
) -> None:
    task_id, *others = await add(store, number)
    held = await claim(store)
    pause = await sessions.pause("cancel_request", "INSERT", "NEW.reason = 'no need'")

    call = store.cancel_many([task_id, *others], "no need")
    cancelling = await sessions.blocked(call, by=pause)
    await store.settle(settlements(held, Outcome.DEAD)[:1])
    await store.retry(task_id)
    assert await granted(store) == [task_id]
    await pause.commit()

    # Whoever has reopened it may not have wanted that; whoever asks again does.
    assert await cancelling == [CancelAnswer.HELD, *[CancelAnswer.REQUESTED] * len(others)]
    assert await store.requested_cancellations([task_id]) == {}
    assert await store.cancel_many([task_id], "again") == [CancelAnswer.REQUESTED]


@pytest.mark.parametrize("is_claimed", [False, True])
async def test_a_cancel_whose_task_is_reopened_meanwhile_looks_again(
    store: PostgresStore, sessions: Sessions, is_claimed: bool
) -> None:
    (task_id,) = await add(store)
    held = await claim(store)
    pause = await sessions.pause("cancel_request", "INSERT", "NEW.reason = 'no need'")

    cancelling = await sessions.blocked(store.cancel(task_id, "no need"), by=pause)
    await store.settle(settlements(held, Outcome.DEAD))
    await store.retry(task_id)
    if is_claimed:
        assert await granted(store) == [task_id]
    await pause.commit()

    assert await cancelling is (CancelAnswer.REQUESTED if is_claimed else CancelAnswer.CANCELLED)
    assert await sessions.places(task_id) == (["claim"] if is_claimed else ["history"])


async def test_many_are_cancelled_into_places_that_were_not_there(store: PostgresStore) -> None:
    ids = await add(store, 2, retention=timedelta(days=400))

    assert await store.cancel_many(ids, "no need") == [CancelAnswer.CANCELLED] * 2


# Promotion against cancel and change


@pytest.mark.parametrize("verb", ["cancel", "change"])
async def test_a_promotion_skips_a_task_that_somebody_is_taking(
    store: PostgresStore, sessions: Sessions, verb: str
) -> None:
    taken, due = await add(store, 2, delay=60.0)
    await sessions.advance(timedelta(seconds=61))
    taking = await sessions.begin()
    await take(taking.store, taken, verb)

    async with asyncio.timeout(AT_ONCE):
        promoted = await store.promote(100)
    await taking.rollback()

    assert promoted == 1
    assert await sessions.places(due) == ["ready"]
    assert await sessions.places(taken) == ["scheduled"]
    assert await store.promote(100) == 1
    assert await sessions.places(taken) == ["ready"]


@pytest.mark.parametrize("undone", [False, True])
@pytest.mark.parametrize("verb", ["cancel", "change"])
async def test_whoever_waits_for_a_promotion_finds_the_task_where_it_is_then(
    store: PostgresStore, sessions: Sessions, verb: str, undone: bool
) -> None:
    (task_id,) = await add(store, delay=60.0)
    await sessions.advance(timedelta(seconds=61))
    promoting = await sessions.begin()
    assert await promoting.store.promote(100) == 1

    taking = await sessions.blocked(take(store, task_id, verb), by=promoting)
    await (promoting.rollback() if undone else promoting.commit())
    await taking

    if verb == "cancel":
        assert await sessions.places(task_id) == ["history"]
        assert (await store.get(task_id)).status is TaskState.CANCELLED
    else:
        assert await sessions.places(task_id) == ["scheduled"]
        assert (await store.get(task_id)).priority == 50


async def test_two_promotions_at_once_share_what_is_due(
    store: PostgresStore, sessions: Sessions
) -> None:
    await add(store, 10, delay=60.0)
    await sessions.advance(timedelta(seconds=61))
    promoting = await sessions.begin()
    assert await promoting.store.promote(4) == 4

    async with asyncio.timeout(AT_ONCE):
        assert await store.promote(100) == 6
    await promoting.commit()

    assert len(await granted(store, limit=100)) == 10


async def take(store: PostgresStore, task_id: UUID, verb: str) -> None:
    if verb == "cancel":
        await store.cancel(task_id, "no need")
    else:
        await store.change(task_id, Change(priority=50, delay=3600.0))
