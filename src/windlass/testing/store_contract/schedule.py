"""Rules of schedules, and of what becomes of their slots."""

# ruff: noqa: S101 - tests assert

import asyncio
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from windlass.model.errors import NotLeader, ScheduleNotFound, StoreBusy
from windlass.model.limits import CHANGED, LAST_SLOTS, PAUSED, RETIRED
from windlass.model.schedule import (
    DueSchedule,
    Overlap,
    Schedule,
    ScheduleChanges,
    ScheduleRecord,
    SlotRecord,
    SlotState,
    Timing,
)
from windlass.model.task import NewTask, Outcome, TaskFilter, TaskState
from windlass.policy.schedule import decide
from windlass.store.port import Store
from windlass.testing.store_contract.steps import (
    DAY,
    SECOND,
    TERM,
    Steps,
    needs,
    new_id,
)

OWNER = "shop:app"
HOUR = timedelta(hours=1)
HOURLY = Timing(every=HOUR)


def new_ids(number: int) -> list[UUID]:
    """Make ids of tasks."""
    return [new_id() for _ in range(number)]


def a_schedule(name: str = "hourly", timing: Timing = HOURLY, **options: Any) -> Schedule:
    """Make a schedule."""
    task = NewTask(UUID(int=0), "resize", '{"width": 100}')
    return Schedule(**({"name": name, "timing": timing, "task": task} | options))


class _Schedules(Steps):
    """The words of these rules."""

    async def register(
        self, store: Store, *schedules: Schedule, owner: str = OWNER
    ) -> ScheduleChanges:
        return await store.register_schedules(owner, schedules)

    async def planned(self, store: Store, **options: Any) -> Schedule:
        """Register a schedule, and let the leader look at it once."""
        schedule = a_schedule(**options)
        await self.register(store, schedule)
        await self.fire(store)
        return schedule

    async def fire(self, store: Store) -> list[UUID]:
        """Do what a leader does; return the tasks that it enqueues."""
        fired: list[UUID] = []
        for due in await store.due_schedules(100):
            fired += await store.decide_slots(decide(due, new_ids)) or []
        return fired

    async def due_one(self, store: Store) -> DueSchedule:
        (due,) = await store.due_schedules(100)
        return due

    async def known(self, store: Store, name: str = "hourly") -> ScheduleRecord:
        (found,) = [one for one in await store.schedules() if one.name == name]
        return found

    async def states(self, store: Store, name: str = "hourly") -> list[tuple[SlotState, int]]:
        """What became of the slots, the oldest first, and how many each record stands for."""
        return [(one.state, one.slots) for one in reversed(await store.slots(name, 1000))]

    async def last(self, store: Store, name: str = "hourly") -> SlotRecord:
        return (await store.slots(name, 1))[0]

    async def complete(self, store: Store) -> None:
        claim, task = await self.claim_one(store)
        await self.settle(store, claim, task, Outcome.COMPLETED)

    async def tasks_of(self, store: Store) -> int:
        return len((await store.tasks(TaskFilter(type="resize", limit=1000))).records)


class ScheduleRules(_Schedules):
    """Schedule rules: what they are."""

    async def test_a_schedule_is_listed_as_it_was_registered(self, store: Store) -> None:
        timing = Timing(cron="0 3 * * *", timezone="Europe/Zurich")
        given = a_schedule(
            "nightly", timing, overlap=Overlap.QUEUE, catch_up=7, jitter=timedelta(seconds=90)
        )

        changes = await self.register(store, given)

        record = await self.known(store, "nightly")
        assert changes == ScheduleChanges(added=("nightly",))
        assert (record.owner, record.type, record.payload, record.queue) == (
            *(OWNER, "resize", {"width": 100}),
            "default",
        )
        assert record.timing == timing
        assert (record.overlap, record.catch_up, record.jitter) == (Overlap.QUEUE, 7, 90.0)
        assert record.paused_at is None
        assert record.last_fired is None
        assert record.last_skipped is None

    async def test_schedules_are_listed_by_name(self, store: Store) -> None:
        await self.register(store, *map(a_schedule, ("b", "B", "a")))

        assert [one.name for one in await store.schedules()] == ["B", "a", "b"]

    async def test_registering_the_same_changes_nothing(self, store: Store) -> None:
        given = a_schedule(task=NewTask(UUID(int=0), "resize", '{"b": 1.0, "a": {"c": 1e2}}'))
        await self.register(store, given)
        before = await self.known(store)
        await self.advance(store, SECOND)

        changes = await self.register(store, given)

        assert changes == ScheduleChanges()
        assert await self.known(store) == before

    async def test_what_is_not_registered_any_more_is_retired(self, store: Store) -> None:
        await self.register(store, a_schedule("a"), a_schedule("b"))

        changes = await self.register(store, a_schedule("b"))

        assert changes == ScheduleChanges(retired=("a",))
        assert [one.name for one in await store.schedules()] == ["b"]
        for call in (store.pause_schedule, store.resume_schedule):
            with pytest.raises(ScheduleNotFound, match="'a'"):
                await call("a")
        with pytest.raises(ScheduleNotFound, match="'a'"):
            await store.run_schedule("a", new_id())

    async def test_other_applications_keep_their_schedules(self, store: Store) -> None:
        await self.register(store, a_schedule("a"))
        await self.register(store, a_schedule("b"), owner="mail:app")

        await self.register(store, owner="mail:app")

        assert [one.name for one in await store.schedules()] == ["a"]

    async def test_an_owner_without_a_name_retires_nothing(self, store: Store) -> None:
        await self.register(store, a_schedule("a"), owner="")

        changes = await self.register(store, a_schedule("b"), owner="")

        assert changes == ScheduleChanges(added=("b",))
        assert [one.name for one in await store.schedules()] == ["a", "b"]

    async def test_a_name_of_another_application_is_taken_over(self, store: Store) -> None:
        await self.register(store, a_schedule())

        changes = await self.register(store, a_schedule(), owner="mail:app")

        assert changes.taken_over == ("hourly",)
        assert await self.register(store) == ScheduleChanges()
        assert (await self.known(store)).owner == "mail:app"

    async def test_a_change_of_the_task_leaves_the_slots_alone(self, store: Store) -> None:
        schedule = await self.planned(store)
        await self.advance(store, HOUR)

        changes = await self.register(
            store, replace(schedule, task=schedule.task._replace(payload="{}"))
        )

        (fired,) = await self.fire(store)
        assert changes == ScheduleChanges(changed=("hourly",))
        assert (await store.get(fired)).payload == {}

    async def test_a_change_of_the_timing_fires_no_slot_before_it(self, store: Store) -> None:
        await self.planned(store, timing=Timing(every=1000 * DAY))
        await self.advance(store, 5 * HOUR)

        await self.register(store, a_schedule())

        assert await self.fire(store) == []
        await self.advance(store, HOUR)
        assert len(await self.fire(store)) == 1

    async def test_a_slot_that_was_due_when_the_timing_changed_is_recorded(
        self, store: Store
    ) -> None:
        await self.planned(store)
        await self.advance(store, HOUR)

        await self.register(store, a_schedule(timing=Timing(every=2 * HOUR)))

        last = await self.last(store)
        assert (last.state, last.reason) == (SlotState.SKIPPED, CHANGED)
        assert (await self.known(store)).last_skipped == last

    async def test_a_slot_that_was_due_at_the_retirement_is_recorded(self, store: Store) -> None:
        await self.planned(store)
        await self.advance(store, HOUR)
        await self.register(store)

        assert await self.fire(store) == []
        await self.register(store, a_schedule())
        last = await self.last(store)
        assert (last.state, last.reason) == (SlotState.SKIPPED, RETIRED)

    @pytest.mark.parametrize("code", ["changed", "retired"])
    async def test_every_slot_that_was_due_when_code_changed_is_recorded(
        self, store: Store, code: str
    ) -> None:
        await self.planned(store)
        await self.advance(store, 3 * HOUR)
        await store.pause_schedule("hourly")
        await self.advance(store, 5 * HOUR)

        await self.register(store, *[a_schedule(timing=Timing(every=DAY))][: code == "changed"])
        await self.register(store, a_schedule(timing=Timing(every=DAY)))

        slots = [(one.reason, one.slots) for one in await store.slots("hourly", 10)]
        assert slots == [("paused", 5), (PAUSED, 3)]

    async def test_all_slots_that_nobody_decided_on_before_a_change_are_counted(
        self, store: Store
    ) -> None:
        await self.planned(store)
        await self.advance(store, 7 * HOUR)

        await self.register(store, a_schedule(timing=Timing(every=DAY)))

        (slot,) = await store.slots("hourly", 10)
        assert (slot.state, slot.reason, slot.slots) == (SlotState.SKIPPED, CHANGED, 7)
        assert slot.first_at == slot.slot_at - 6 * HOUR

    async def test_slots_that_wait_are_skipped_with_their_schedule(self, store: Store) -> None:
        await self.planned(store, overlap=Overlap.QUEUE)
        for _ in range(2):
            await self.advance(store, HOUR)
            await self.fire(store)
        await self.register(store)
        await self.complete(store)

        await self.register(store, a_schedule(overlap=Overlap.QUEUE))

        assert await self.fire(store) == []
        last = await self.last(store)
        assert (last.state, last.reason) == (SlotState.SKIPPED, RETIRED)

    async def test_slots_that_wait_go_on_after_a_pause(self, store: Store) -> None:
        await self.planned(store, overlap=Overlap.QUEUE)
        for _ in range(2):
            await self.advance(store, HOUR)
            await self.fire(store)
        await store.pause_schedule("hourly")
        await self.complete(store)
        await self.advance(store, 2 * SECOND)
        assert await self.fire(store) == []

        await store.resume_schedule("hourly")

        assert len(await self.fire(store)) == 1

    async def test_what_comes_back_fires_no_slot_before_that(self, store: Store) -> None:
        await self.planned(store)
        await self.register(store)
        await self.advance(store, 5 * HOUR)

        changes = await self.register(store, a_schedule())

        assert changes == ScheduleChanges(added=("hourly",))
        assert await self.fire(store) == []
        await self.advance(store, HOUR)
        assert len(await self.fire(store)) == 1

    async def test_a_pause_outlives_changes_and_retirement(self, store: Store) -> None:
        await self.planned(store)
        await store.pause_schedule("hourly")
        await self.register(store, a_schedule(timing=Timing(every=2 * HOUR)))
        assert (await self.known(store)).paused_at is not None
        await self.register(store)

        await self.register(store, a_schedule())

        assert (await self.known(store)).paused_at is not None
        await self.advance(store, 5 * HOUR)
        assert await self.fire(store) == []

    async def test_pausing_and_resuming_say_what_was(self, store: Store) -> None:
        await self.register(store, a_schedule())

        answers = [
            await store.resume_schedule("hourly"),
            await store.pause_schedule("hourly"),
            await store.pause_schedule("hourly"),
            await store.resume_schedule("hourly"),
            await store.resume_schedule("hourly"),
        ]

        assert answers == [False, True, False, True, False]
        with pytest.raises(ScheduleNotFound):
            await store.pause_schedule("unknown")
        with pytest.raises(ScheduleNotFound):
            await store.slots("unknown", 10)

    @needs("concurrent_writers")
    async def test_workers_that_start_together_add_a_schedule_once(self, store: Store) -> None:
        many = [a_schedule(name) for name in ("a", "b", "c")]

        changes = await asyncio.gather(*(self.register(store, *many) for _ in range(5)))

        assert sorted(one.added for one in changes) == [()] * 4 + [("a", "b", "c")]

    async def test_a_schedule_is_run_by_hand_once_for_each_call(self, store: Store) -> None:
        await self.register(store, a_schedule())
        await store.pause_schedule("hourly")
        task_id = new_id()

        await store.run_schedule("hourly", task_id)
        await store.run_schedule("hourly", task_id)

        record = await store.get(task_id)
        (slot,) = await store.slots("hourly", 10)
        assert (record.type, record.payload) == ("resize", {"width": 100})
        assert (slot.task_id, slot.on_request, slot.state) == (str(task_id), True, SlotState.FIRED)
        assert await self.tasks_of(store) == 1


class FireRules(_Schedules):
    """Schedule rules: what becomes of slots."""

    async def test_without_schedules_none_wants_a_decision(self, store: Store) -> None:
        assert (await store.due()).schedule_in is None
        assert await store.due_schedules(10) == []

        await self.register(store, a_schedule())
        await store.pause_schedule("hourly")

        assert (await store.due()).schedule_in is None

    async def test_a_new_schedule_is_looked_at_at_once_and_then_at_its_slot(
        self, store: Store
    ) -> None:
        await self.register(store, a_schedule())
        first = (await store.due()).schedule_in
        await self.fire(store)

        then = (await store.due()).schedule_in

        assert first is not None
        assert first <= 0
        assert then is not None
        assert 0 < then <= 3600
        assert await store.due_schedules(10) == []

    async def test_a_slot_is_fired_with_its_task(self, store: Store) -> None:
        await self.planned(store)
        await self.advance(store, HOUR)

        (task_id,) = await self.fire(store)

        task, slot = await store.get(task_id), await self.last(store)
        assert (task.type, task.payload, task.status) == (
            "resize",
            {"width": 100},
            TaskState.PENDING,
        )
        assert slot.task_id == task.id
        assert slot.slot_at.timestamp() % 3600 == 0
        assert (await self.known(store)).last_fired == slot
        assert await self.fire(store) == []

    async def test_two_leaders_that_read_the_same_fire_a_slot_once(self, store: Store) -> None:
        await self.planned(store)
        await self.advance(store, HOUR)
        one, two = await self.due_one(store), await self.due_one(store)

        answers = [await store.decide_slots(decide(due, new_ids)) for due in (one, two)]

        assert answers[0] is not None
        assert answers[1] is None
        assert await self.tasks_of(store) == 1

    @needs("concurrent_writers")
    async def test_leaders_at_the_same_time_fire_a_slot_once(self, store: Store) -> None:
        await self.planned(store, overlap=Overlap.ALLOW)
        await self.advance(store, HOUR)
        due = await self.due_one(store)

        answers = await asyncio.gather(
            *(store.decide_slots(decide(due, new_ids)) for _ in range(5)), return_exceptions=True
        )

        assert sum(isinstance(answer, list) for answer in answers) == 1
        assert all(one is None or isinstance(one, list | StoreBusy) for one in answers)
        assert await self.tasks_of(store) == 1

    async def test_a_leader_whose_term_is_over_fires_nothing(self, store: Store) -> None:
        await self.planned(store)
        leadership = await self.elect(store)
        await self.advance(store, HOUR + TERM)
        decision = decide(await self.due_one(store), new_ids)

        with pytest.raises(NotLeader):
            await store.decide_slots(decision, leadership=leadership)
        with pytest.raises(NotLeader):
            await store.prune_slots(most=1, leadership=leadership)

        assert await store.slots("hourly", 10) == []
        assert len(await self.fire(store)) == 1

    async def test_a_decision_on_what_was_changed_since_is_void(self, store: Store) -> None:
        schedule = await self.planned(store)
        await self.advance(store, HOUR)
        decision = decide(await self.due_one(store), new_ids)

        await store.pause_schedule("hourly")
        assert await store.decide_slots(decision) is None
        await store.resume_schedule("hourly")
        assert await store.decide_slots(decision) is None
        await self.register(store, replace(schedule, catch_up=5))
        assert await store.decide_slots(decision) is None
        await self.register(store)
        assert await store.decide_slots(decision) is None

        assert await self.tasks_of(store) == 0

    async def test_a_clock_that_is_set_back_fires_no_slot_twice(self, store: Store) -> None:
        await self.planned(store, overlap=Overlap.ALLOW)
        await self.advance(store, HOUR)
        assert len(await self.fire(store)) == 1

        await self.advance(store, -HOUR)
        again = await self.fire(store)
        await self.advance(store, HOUR)
        once_more = await self.fire(store)

        assert (again, once_more) == ([], [])
        await self.advance(store, HOUR)
        assert len(await self.fire(store)) == 1

    async def test_a_clock_that_is_set_ahead_and_back_stops_no_schedule(self, store: Store) -> None:
        await self.planned(store, overlap=Overlap.ALLOW)
        await self.advance(store, 1000 * DAY)
        assert len(await self.fire(store)) == 1

        await self.advance(store, -1000 * DAY)
        await self.fire(store)
        await self.advance(store, HOUR)

        assert len(await self.fire(store)) == 1

    @pytest.mark.parametrize("overlap", Overlap)
    async def test_each_slot_that_a_clock_jumped_over_is_fired_on_time(
        self, store: Store, overlap: Overlap
    ) -> None:
        await self.planned(store, overlap=overlap)
        await self.advance(store, 5 * HOUR)
        ahead = await self.fire(store)
        await self.advance(store, -5 * HOUR)
        await self.fire(store)
        if overlap is not Overlap.ALLOW:
            await self.complete(store)

        fired: list[int] = []
        for _ in range(6):
            await self.advance(store, HOUR)
            fired.append(len(await self.fire(store)))
            if fired[-1] and overlap is not Overlap.ALLOW:
                await self.complete(store)

        assert len(ahead) == 1
        assert fired == [1, 1, 1, 1, 0, 1]
        assert await self.states(store) == [(SlotState.FIRED, 1)] * 6

    async def test_a_clock_that_is_set_back_beyond_the_kept_slots_fires_none_twice(
        self, store: Store
    ) -> None:
        await self.planned(store, overlap=Overlap.ALLOW, catch_up=20)
        await self.advance(store, 20 * HOUR)
        assert len(await self.fire(store)) == 20
        await store.prune_slots(most=5, leadership=await self.elect(store))

        await self.advance(store, -20 * HOUR)
        again = await self.fire(store)
        for _ in range(20):
            await self.advance(store, HOUR)
            again += await self.fire(store)

        assert again == []
        await self.advance(store, HOUR)
        assert len(await self.fire(store)) == 1

    async def test_a_clock_that_was_ahead_for_long_stops_no_schedule_and_fires_none_twice(
        self, store: Store
    ) -> None:
        await self.planned(store, overlap=Overlap.ALLOW, catch_up=20)
        await self.advance(store, 1000 * DAY)
        assert len(await self.fire(store)) == 20
        await store.prune_slots(most=5, leadership=await self.elect(store))

        await self.advance(store, -1000 * DAY)
        assert await self.fire(store) == []
        await self.advance(store, HOUR)
        assert len(await self.fire(store)) == 1
        await self.advance(store, 1000 * DAY - HOUR)

        assert len(await self.fire(store)) <= 1  # by now the clock may show the next hour

    async def test_of_missed_slots_the_last_is_fired_and_the_others_recorded(
        self, store: Store
    ) -> None:
        await self.planned(store)
        await self.advance(store, 10 * HOUR)

        fired = await self.fire(store)

        assert len(fired) == 1
        assert await self.states(store) == [(SlotState.SKIPPED, 9), (SlotState.FIRED, 1)]
        skipped = (await self.known(store)).last_skipped
        assert skipped is not None
        assert skipped.first_at == skipped.slot_at - 8 * HOUR

    async def test_no_missed_slot_is_fired_if_none_is_to_be(self, store: Store) -> None:
        await self.planned(store, catch_up=0, timing=Timing(every=DAY))
        now = await store.now()
        midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
        await self.advance(store, midnight + 3 * DAY + HOUR - now)

        fired = await self.fire(store)

        assert fired == []
        assert sum(number for _, number in await self.states(store)) == 3
        assert {state for state, _ in await self.states(store)} == {SlotState.SKIPPED}

    async def test_missed_slots_are_fired_up_to_a_number(self, store: Store) -> None:
        await self.planned(store, catch_up=3, overlap=Overlap.ALLOW)
        await self.advance(store, 10 * HOUR)

        fired = await self.fire(store)

        assert len(fired) == 3
        fires = [(SlotState.FIRED, 1)] * 3
        assert await self.states(store) == [(SlotState.SKIPPED, 7), *fires]

    async def test_slots_of_a_pause_are_recorded_as_skipped(self, store: Store) -> None:
        await self.planned(store)
        await store.pause_schedule("hourly")
        await self.advance(store, 5 * HOUR)
        assert await self.fire(store) == []

        await store.resume_schedule("hourly")

        assert await self.fire(store) == []
        (slot,) = await store.slots("hourly", 10)
        assert (slot.state, slot.slots, slot.reason) == (SlotState.SKIPPED, 5, "paused")
        await self.advance(store, HOUR)
        assert len(await self.fire(store)) == 1

    async def test_one_that_is_resumed_wants_a_decision_at_once(self, store: Store) -> None:
        await self.planned(store)
        await store.pause_schedule("hourly")

        await store.resume_schedule("hourly")

        wait = await store.schedule_in()
        assert wait is not None
        assert wait <= 0
        assert (await self.due_one(store)).resumed_at is not None

    async def test_a_slot_that_was_due_when_somebody_paused_says_so(self, store: Store) -> None:
        await self.planned(store)
        await self.advance(store, HOUR)
        await store.pause_schedule("hourly")
        await store.resume_schedule("hourly")

        assert await self.fire(store) == []

        (slot,) = await store.slots("hourly", 10)
        assert (slot.state, slot.reason) == (SlotState.SKIPPED, PAUSED)

    async def test_a_slot_is_skipped_while_a_task_has_not_ended(self, store: Store) -> None:
        await self.planned(store)
        await self.advance(store, HOUR)
        (first,) = await self.fire(store)
        await self.advance(store, HOUR)

        assert await self.fire(store) == []

        last = await self.last(store)
        assert last.state is SlotState.SKIPPED
        assert str(first) in (last.reason or "")
        await self.complete(store)
        await self.advance(store, HOUR)
        assert len(await self.fire(store)) == 1

    async def test_a_slot_is_skipped_while_a_task_that_was_asked_for_has_not_ended(
        self, store: Store
    ) -> None:
        await self.planned(store)
        await store.run_schedule("hourly", new_id())
        await self.advance(store, HOUR)

        assert await self.fire(store) == []

    async def test_slots_may_overlap(self, store: Store) -> None:
        await self.planned(store, overlap=Overlap.ALLOW)
        await self.advance(store, HOUR)
        await self.fire(store)
        await self.advance(store, HOUR)

        assert len(await self.fire(store)) == 1

    async def test_a_slot_waits_for_the_task_before_it(self, store: Store) -> None:
        await self.planned(store, overlap=Overlap.QUEUE)
        for _ in range(3):
            await self.advance(store, HOUR)
            await self.fire(store)
        states = await self.states(store)
        await self.complete(store)
        await self.advance(store, 2 * SECOND)

        released = await self.fire(store)

        waiting, skipped = (SlotState.WAITING, 1), (SlotState.SKIPPED, 1)
        assert states == [(SlotState.FIRED, 1), waiting, skipped]
        assert len(released) == 1
        fired = (SlotState.FIRED, 1)
        assert await self.states(store) == [fired, fired, skipped]
        assert await self.tasks_of(store) == 2

    async def test_a_slot_that_does_not_wait_any_more_is_not_released(self, store: Store) -> None:
        await self.planned(store, overlap=Overlap.QUEUE)
        for _ in range(2):
            await self.advance(store, HOUR)
            await self.fire(store)
        await self.complete(store)
        await self.advance(store, 2 * SECOND)
        decision = decide(await self.due_one(store), new_ids)
        await store.decide_slots(decision)
        await self.complete(store)
        due = replace(
            decision, decided_until=decision.until, until=decision.until + timedelta(seconds=1)
        )

        again = await store.decide_slots(due)

        assert again == []
        assert await self.states(store) == [(SlotState.FIRED, 1)] * 2
        assert await self.tasks_of(store) == 2

    async def test_a_slot_that_waits_is_looked_at_every_second(self, store: Store) -> None:
        await self.planned(store, overlap=Overlap.QUEUE)
        for _ in range(2):
            await self.advance(store, HOUR)
            await self.fire(store)

        wait = (await store.due()).schedule_in

        assert wait is not None
        assert wait <= 1

    async def test_jitter_puts_the_task_off_and_not_the_slot(self, store: Store) -> None:
        await self.planned(store, jitter=1000 * DAY)
        await self.advance(store, HOUR)

        (task_id,) = await self.fire(store)

        task, slot = await store.get(task_id), await self.last(store)
        assert task.status is TaskState.SCHEDULED
        assert task.scheduled_for is not None
        assert slot.slot_at < task.scheduled_for < slot.slot_at + 1000 * DAY

    async def test_a_task_of_a_slot_carries_its_options(self, store: Store) -> None:
        options: dict[str, Any] = {"queue": "bulk", "priority": 30, "max_attempts": 2}
        task = NewTask(UUID(int=0), "resize", "{}", **options, tags=("a", "b"), expires=60.0)
        await self.planned(store, task=task)
        await self.advance(store, HOUR)

        (task_id,) = await self.fire(store)

        record = await store.get(task_id)
        assert (record.queue, record.priority, record.max_attempts) == ("bulk", 30, 2)
        assert sorted(record.tags) == ["a", "b"]
        leadership = await self.elect(store)
        await self.advance(store, timedelta(seconds=10))
        assert (await store.expire(10, leadership=leadership)).cancelled == 0

    async def test_old_slots_are_forgotten_but_for_the_last_ones(self, store: Store) -> None:
        await self.planned(store, overlap=Overlap.ALLOW, catch_up=20)
        await self.advance(store, 20 * HOUR)
        await self.fire(store)
        leadership = await self.elect(store)

        surplus = await store.prune_slots(most=15, leadership=leadership)
        await self.advance(store, 8 * DAY)
        await store.pause_schedule("hourly")
        leadership = await self.elect(store)
        old = await store.prune_slots(most=15, leadership=leadership)

        assert (surplus, old) == (5, 15 - LAST_SLOTS)
        assert len(await store.slots("hourly", 100)) == LAST_SLOTS

    async def test_a_retired_schedule_is_forgotten_after_a_while(self, store: Store) -> None:
        await self.planned(store)
        await store.pause_schedule("hourly")
        await self.register(store)
        await self.advance(store, 8 * DAY)
        leadership = await self.elect(store)

        await store.prune_slots(most=15, leadership=leadership)

        await self.register(store, a_schedule())
        assert (await self.known(store)).paused_at is None

    @needs("wakeups")
    async def test_whoever_listens_is_told_of_what_wants_a_first_decision(
        self, store: Store
    ) -> None:
        loop = asyncio.get_running_loop()
        told: asyncio.Queue[str] = asyncio.Queue()
        doing = ""

        def scheduled() -> None:
            loop.call_soon_threadsafe(told.put_nowait, doing)

        async with store.listen(lambda *_: None, scheduled=scheduled), asyncio.timeout(10):
            for doing in ("added", "changed", "resumed", "revived"):
                timing = HOURLY if doing == "added" else Timing(every=2 * HOUR)
                if doing == "resumed":
                    await store.pause_schedule("hourly")
                    await store.resume_schedule("hourly")
                else:
                    if doing == "revived":
                        await self.register(store)
                    await self.register(store, a_schedule(timing=timing))
                assert await told.get() == doing
            await self.register(store, a_schedule(timing=timing))
            await store.pause_schedule("hourly")

        assert told.empty()

    async def test_some_may_be_left_out(self, store: Store) -> None:
        await self.register(store, *map(a_schedule, "ab"))
        await self.fire(store)
        await self.register(store, *map(a_schedule, "abc"))

        due = await store.due_schedules(10, without=["c"])
        waits = [await store.schedule_in(without=names) for names in ((), "c", "abc")]

        assert due == []
        assert [one.schedule.name for one in await store.due_schedules(10, without="ab")] == ["c"]
        assert waits[0] is not None
        assert waits[1] is not None
        assert waits[0] <= 0 < waits[1] <= 3600
        assert waits[2] is None

    async def test_a_cron_expression_is_fired_in_its_time_zone(self, store: Store) -> None:
        zone = Timing(cron="30 4 * * *", timezone="Asia/Kathmandu")  # 5:45 ahead
        await self.planned(store, timing=zone)
        await self.advance(store, DAY)

        await self.fire(store)

        slot = await self.last(store)
        assert (slot.slot_at.hour, slot.slot_at.minute) == (22, 45)
        assert slot.slot_at <= await store.now()

    async def test_the_longest_due_come_first(self, store: Store) -> None:
        await self.register(store, a_schedule("a"), a_schedule("b", Timing(every=HOUR / 2)))
        await self.fire(store)
        await self.advance(store, 2 * HOUR)

        first: list[datetime] = []
        for limit in (1, 2):
            found = await store.due_schedules(limit)
            first.append(found[0].now)
            assert len(found) == limit

        assert first[0] <= first[1]
