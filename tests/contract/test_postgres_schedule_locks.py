"""Schedules that somebody changes, or decides on, while another does."""

from datetime import timedelta
from uuid import UUID

import pytest

from contract.postgres_sessions import (
    OTHER_WORKER,
    TERM,
    WORKER,
    Sessions,
    lead,
    new_task,
)
from windlass.model.errors import NotLeader
from windlass.model.schedule import Overlap, Schedule, ScheduleChanges, SlotDecision, Timing
from windlass.model.task import NewTask
from windlass.policy.schedule import decide
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

    second = await sessions.blocked(store.decide_slots(other), by=first)
    await first.commit()

    assert await second is None
    assert len(await store.slots("hourly", 10)) == 1


async def test_a_decision_that_is_rolled_back_leaves_the_slot_to_the_next(
    store: PostgresStore, sessions: Sessions
) -> None:
    decision = await a_due_slot(store, sessions)
    other = await due_decision(store)
    first = await sessions.begin()
    await first.store.decide_slots(decision)

    second = await sessions.blocked(store.decide_slots(other), by=first)
    await first.rollback()

    assert len(await second or []) == 1


@pytest.mark.parametrize("change", ["pause", "retire", "alter"])
async def test_a_decision_that_waits_for_a_change_is_void(
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

    deciding = await sessions.blocked(store.decide_slots(decision), by=changing)
    await changing.commit()

    assert await deciding is None


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


async def test_workers_that_start_together_wait_for_each_other_once(
    store: PostgresStore, sessions: Sessions
) -> None:
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
