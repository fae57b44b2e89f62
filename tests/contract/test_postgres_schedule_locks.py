"""Schedules that somebody changes, or decides on, while another does."""

import asyncio
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from uuid import UUID

import pytest

from contract.postgres_sessions import (
    AT_ONCE,
    DEADLINE,
    OTHER_WORKER,
    TERM,
    WORKER,
    Sessions,
    lead,
    new_task,
)
from windlass.maintenance.schedules import Firing
from windlass.model.errors import NotLeader, StoreBusy
from windlass.model.schedule import Overlap, Schedule, ScheduleChanges, SlotDecision, Timing
from windlass.model.task import NewTask
from windlass.policy.schedule import decide
from windlass.store.postgres import scheduling
from windlass.store.postgres.store import PostgresStore

HOUR = timedelta(hours=1)
HOURLY = Schedule(
    name="hourly",
    timing=Timing(every=HOUR),
    task=NewTask(UUID(int=0), "resize", "{}"),
    overlap=Overlap.ALLOW,
)


def new_ids(number: int) -> list[UUID]:
    return [new_task().id for _ in range(number)]


async def due_decision(store: PostgresStore) -> SlotDecision:
    (due,) = await store.due_schedules(10)
    return decide(due, new_ids)


async def a_due_slot(store: PostgresStore, sessions: Sessions) -> SlotDecision:
    await store.register_schedules("shop", [HOURLY])
    await store.decide_slots(await due_decision(store))
    await sessions.advance(HOUR)
    return await due_decision(store)


async def test_of_two_leaders_that_decide_at_once_the_second_fires_nothing(
    store: PostgresStore, sessions: Sessions
) -> None:
    decision = await a_due_slot(store, sessions)
    other = await due_decision(store)
    first = await sessions.begin()
    assert len(await first.store.decide_slots(decision) or []) == 1

    with pytest.raises(StoreBusy, match="another transaction holds schedule 'hourly'"):
        await store.decide_slots(other)
    await first.commit()

    assert await store.decide_slots(other) is None
    assert len(await store.slots("hourly", 10)) == 1


async def test_a_decision_that_is_rolled_back_leaves_the_slot_to_the_next(
    store: PostgresStore, sessions: Sessions
) -> None:
    decision = await a_due_slot(store, sessions)
    other = await due_decision(store)
    first = await sessions.begin()
    await first.store.decide_slots(decision)

    with pytest.raises(StoreBusy):
        await store.decide_slots(other)
    await first.rollback()

    assert len(await store.decide_slots(other) or []) == 1


@pytest.mark.parametrize("change", ["pause", "retire", "alter"])
async def test_a_decision_on_what_somebody_changes_is_void(
    store: PostgresStore, sessions: Sessions, change: str
) -> None:
    decision = await a_due_slot(store, sessions)
    changing = await sessions.begin()
    if change == "pause":
        await changing.store.pause_schedule("hourly")
    elif change == "retire":
        await changing.store.register_schedules("shop", [])
    else:
        altered = Schedule(name="hourly", timing=HOURLY.timing, task=HOURLY.task, catch_up=5)
        await changing.store.register_schedules("shop", [altered])

    with pytest.raises(StoreBusy):
        await store.decide_slots(decision)
    await changing.commit()

    assert await store.decide_slots(decision) is None


HOLDS = {
    "its row": "UPDATE windlass.schedule SET jitter = jitter WHERE name = 'hourly'",
    "its slot": "INSERT INTO windlass.slot (schedule, slot_at, state, decided_at) "
    "SELECT 'hourly', to_timestamp(floor(extract(epoch FROM windlass.clock()) / 3600) * 3600), 'skipped', now()",
    "the table of schedules": "LOCK TABLE windlass.schedule IN EXCLUSIVE MODE",
    "the table of slots": "LOCK TABLE windlass.slot IN SHARE MODE",
}


@pytest.mark.parametrize("what", HOLDS)
async def test_a_decision_waits_for_nobody(
    store: PostgresStore, sessions: Sessions, what: str
) -> None:
    decision = await a_due_slot(store, sessions)
    holding = await sessions.begin()
    await holding.connection.execute(HOLDS[what])

    async with asyncio.timeout(AT_ONCE):
        with pytest.raises(StoreBusy):
            await store.decide_slots(decision, leadership=await lead(store))

    await holding.rollback()
    assert len(await store.decide_slots(decision) or []) == 1


@pytest.mark.parametrize("what", ["its row", "its slot"])
async def test_the_others_are_fired_while_one_is_held(
    store: PostgresStore, sessions: Sessions, what: str
) -> None:
    many = [HOURLY, *(replace(HOURLY, name=name) for name in ("a", "z"))]
    await store.register_schedules("shop", many)
    leadership = await lead(store)
    firing = Firing(store, new_ids)
    await firing(leadership)
    await sessions.advance(HOUR)
    leadership = await lead(store)
    holding = await sessions.begin()
    await holding.connection.execute(HOLDS[what])

    again = await firing(leadership)

    assert 0 < again <= 1
    assert [len(await store.slots(name, 10)) for name in ("a", "hourly", "z")] == [1, 0, 1]
    await holding.rollback()
    assert len(await store.decide_slots(await due_decision(store)) or []) == 1


@pytest.mark.parametrize("what", ["its row", "the table of schedules", "the table of slots"])
async def test_who_prunes_slots_waits_for_nobody_for_long(
    store: PostgresStore, sessions: Sessions, what: str
) -> None:
    await store.decide_slots(await a_due_slot(store, sessions))
    leadership = await lead(store)
    holding = await sessions.begin()
    await holding.connection.execute(HOLDS[what])

    async with asyncio.timeout(AT_ONCE):
        with suppress(StoreBusy):
            await store.prune_slots(most=0, leadership=leadership)


@pytest.mark.parametrize("what", ["its row", "the table of schedules"])
async def test_who_registers_waits_for_nobody_for_long(
    store: PostgresStore, sessions: Sessions, what: str
) -> None:
    await store.register_schedules("shop", [HOURLY])
    holding = await sessions.begin()
    await holding.connection.execute(HOLDS[what])

    async with asyncio.timeout(AT_ONCE):
        with pytest.raises(StoreBusy):
            await store.register_schedules("shop", [HOURLY])


async def test_a_pause_waits_for_a_decision_and_holds_from_then_on(
    store: PostgresStore, sessions: Sessions
) -> None:
    decision = await a_due_slot(store, sessions)
    deciding = await sessions.begin()
    await deciding.store.decide_slots(decision)

    pausing = await sessions.blocked(store.pause_schedule("hourly"), by=deciding)
    await deciding.commit()

    assert await pausing
    await sessions.advance(HOUR)
    assert await store.due_schedules(10) == []


async def test_nobody_waits_long_to_pause_resume_or_run_what_somebody_holds(
    store: PostgresStore, sessions: Sessions
) -> None:
    others = [replace(HOURLY, name=name) for name in ("daily", "weekly")]
    await store.register_schedules("shop", [HOURLY, *others])
    user = await sessions.begin()
    await user.connection.execute("SELECT FROM windlass.schedule FOR UPDATE")

    async with asyncio.timeout(AT_ONCE):
        # Each has a row of its own to wait for: behind one another they would wait longer.
        answers = await asyncio.gather(
            store.pause_schedule("hourly"),
            store.resume_schedule("daily"),
            store.run_schedule("weekly", UUID(int=7)),
            return_exceptions=True,
        )
    await user.rollback()

    assert [type(answer) for answer in answers] == 3 * [StoreBusy]
    assert "schedule 'hourly' is held by a transaction that has not ended" in str(answers[0])


async def test_workers_that_start_together_wait_for_each_other_once(
    store: PostgresStore, sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduling, "REGISTER_PATIENCE", timedelta(seconds=DEADLINE))
    first = await sessions.begin()
    await first.store.register_schedules("shop", [HOURLY])

    second = await sessions.blocked(store.register_schedules("shop", [HOURLY]), by=first)
    await first.commit()

    assert await second == ScheduleChanges()


async def test_a_run_by_hand_waits_for_no_decision(
    store: PostgresStore, sessions: Sessions
) -> None:
    decision = await a_due_slot(store, sessions)
    deciding = await sessions.begin()
    await deciding.store.decide_slots(decision)

    await store.run_schedule("hourly", new_task().id)

    assert len(await store.slots("hourly", 10)) == 1
    await deciding.rollback()


async def test_a_leader_that_is_deposed_while_it_waits_fires_nothing(
    store: PostgresStore, sessions: Sessions
) -> None:
    decision = await a_due_slot(store, sessions)
    leadership = await lead(store, WORKER)
    electing = await sessions.begin()
    await electing.store.resign(leadership)
    assert await electing.store.lead(OTHER_WORKER, current=None, term=TERM) is not None

    deciding = await sessions.blocked(
        store.decide_slots(decision, leadership=leadership), by=electing
    )
    await electing.commit()

    with pytest.raises(NotLeader):
        await deciding
    assert await store.slots("hourly", 10) == []
