"""A dead letter that two sessions reach for: replay, discard, retry, retention, and a user's own lock."""

import asyncio
from uuid import UUID

import pytest

from contract.postgres_sessions import (
    AT_ONCE,
    DAY,
    Session,
    Sessions,
    bury,
    granted,
    lead,
    new_task,
)
from windlass.client import replaying
from windlass.client.dead import DeadClient
from windlass.client.replaying import ReplayPlan
from windlass.model.dead import DeadFilter, DiscardAnswer, Replay, ReplayAnswer, Replayed
from windlass.model.errors import StoreBusy
from windlass.registry import Registry
from windlass.store.postgres.store import PostgresStore

HELD = [Replayed(ReplayAnswer.HELD)]
ABSENT = [Replayed(ReplayAnswer.ABSENT)]


async def lock_letter(session: Session, task_id: UUID) -> None:
    """Hold a letter's row as an application's own SQL might."""
    await session.connection.execute("SELECT FROM windlass.dead WHERE id = $1 FOR UPDATE", task_id)


@pytest.mark.parametrize("undone", [False, True])
async def test_of_two_replays_of_a_letter_one_makes_a_task(
    store: PostgresStore, sessions: Sessions, undone: bool
) -> None:
    task_id = await bury(store)
    first, second = (Replay(task_id, new_task().id) for _ in range(2))
    replaying = await sessions.begin()
    made = Replayed(ReplayAnswer.REPLAYED, first.id)
    assert await replaying.store.replay([first]) == [made]

    async with asyncio.timeout(AT_ONCE):
        assert await store.replay([second]) == HELD
    await (replaying.rollback() if undone else replaying.commit())

    (answer,) = await store.replay([second])
    if undone:
        assert answer == Replayed(ReplayAnswer.REPLAYED, second.id)
    else:
        assert answer == Replayed(ReplayAnswer.BEFORE, first.id)
    assert await granted(store) == [answer.task_id]


async def test_a_repeated_call_that_meets_its_first_one_makes_no_other_task(
    store: PostgresStore, sessions: Sessions
) -> None:
    replay = Replay(await bury(store), new_task().id)
    first = await sessions.begin()
    made = await first.store.replay([replay])

    assert await store.replay([replay]) == HELD
    await first.commit()

    assert await store.replay([replay]) == made
    assert await granted(store) == [replay.id]


async def test_a_letter_that_a_user_holds_holds_up_no_other(
    store: PostgresStore, sessions: Sessions
) -> None:
    held, free = await bury(store), await bury(store)
    replays = [Replay(held, new_task().id), Replay(free, new_task().id)]
    user = await sessions.begin()
    await lock_letter(user, held)

    async with asyncio.timeout(AT_ONCE):
        answers = await store.replay(replays)
        assert await store.discard([held]) == [DiscardAnswer.HELD]

    assert answers == [*HELD, Replayed(ReplayAnswer.REPLAYED, replays[1].id)]
    await user.commit()
    assert (await store.replay(replays[:1]))[0].answer is ReplayAnswer.REPLAYED


async def test_whoever_replays_waits_for_a_user_for_a_moment_only(
    store: PostgresStore, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replaying, "HELD_WITHIN", 0.2)
    held = await bury(store)
    user = await sessions.begin()
    await lock_letter(user, held)
    client = DeadClient(store=store, registry=Registry(), max_payload_bytes=1000)

    async with asyncio.timeout(AT_ONCE):
        replayed = await client.replay([held], ReplayPlan())
        discarded = await client.discard([held], dry_run=False)

    for refused in (replayed.refused, discarded.refused):
        assert isinstance(refused[str(held)], StoreBusy)
    await user.commit()
    assert list((await client.replay([held], ReplayPlan())).replayed) == [str(held)]


@pytest.mark.parametrize("undone", [False, True])
async def test_a_letter_is_not_replayed_while_it_is_reopened(
    store: PostgresStore, sessions: Sessions, undone: bool
) -> None:
    task_id = await bury(store)
    replay = Replay(task_id, new_task().id)
    retrying = await sessions.begin()
    await retrying.store.retry(task_id)

    assert await store.replay([replay]) == HELD
    await (retrying.rollback() if undone else retrying.commit())

    answers = await store.replay([replay])
    assert answers == ([Replayed(ReplayAnswer.REPLAYED, replay.id)] if undone else ABSENT)
    assert len(await granted(store)) == 1


async def test_a_letter_that_is_discarded_meanwhile_is_not_replayed(
    store: PostgresStore, sessions: Sessions
) -> None:
    task_id = await bury(store)
    replay = Replay(task_id, new_task().id)
    discarding = await sessions.begin()
    assert await discarding.store.discard([task_id]) == [DiscardAnswer.DISCARDED]

    assert await store.replay([replay]) == HELD
    await discarding.commit()

    assert await store.replay([replay]) == ABSENT
    assert await granted(store) == []


async def test_a_retry_that_waits_for_a_replay_reopens_the_letter_all_the_same(
    store: PostgresStore, sessions: Sessions
) -> None:
    task_id = await bury(store)
    replaying = await sessions.begin()
    replay = Replay(task_id, new_task().id)
    await replaying.store.replay([replay])

    retrying = await sessions.blocked(store.retry(task_id), by=replaying)
    await replaying.commit()
    await retrying

    assert sorted(await granted(store)) == sorted([task_id, replay.id])


async def test_retention_passes_by_a_letter_that_is_being_replayed(
    store: PostgresStore, sessions: Sessions
) -> None:
    held, free = await bury(store), await bury(store)
    replaying = await sessions.begin()
    await replaying.store.replay([Replay(held, new_task().id)])
    await sessions.advance(40 * DAY)

    async with asyncio.timeout(AT_ONCE):
        retained = await store.retain(leadership=await lead(store))

    await replaying.rollback()
    assert retained.dead == 1
    assert (await store.find_dead(DeadFilter())).ids == [held]
    assert await sessions.places(free) == []


async def test_a_look_at_dead_letters_waits_for_nobody(
    store: PostgresStore, sessions: Sessions
) -> None:
    task_id = await bury(store)
    discarding = await sessions.begin()
    await discarding.store.discard([task_id])

    async with asyncio.timeout(AT_ONCE):
        found = await store.find_dead(DeadFilter())

    assert found.ids == [task_id]
