"""How a leader goes round schedules that it cannot decide on now."""

import logging
from collections.abc import Collection
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest

from unit.moved_clock import MovedClock
from windlass.maintenance import schedules as schedules_module
from windlass.maintenance.schedules import BATCH, HELD_AGAIN, HELD_TOLD, NOTICE_EVERY, Firing
from windlass.model.errors import StoreBusy
from windlass.model.schedule import DueSchedule, Overlap, Schedule, SlotDecision, Timing
from windlass.model.task import Leadership, NewTask
from windlass.store.memory import MemoryStore

MINUTE = timedelta(minutes=1)
NOON = datetime(2026, 11, 18, 12, tzinfo=UTC)
LEADERSHIP = Leadership(UUID(int=1), 1)


def a_schedule(name: str) -> Schedule:
    task = NewTask(UUID(int=0), "t", "{}")
    return Schedule(name=name, timing=Timing(every=MINUTE), task=task, overlap=Overlap.ALLOW)


class _Store(MemoryStore):
    """Schedules of which somebody holds some, at a time that is moved with the leader's."""

    def __init__(self, clock: MovedClock) -> None:
        began = clock.now
        super().__init__(clock=lambda: NOON + timedelta(seconds=clock.now - began))
        self.locked: Collection[str] = ()
        self.waits = 0.0  # seconds until it says that one is held
        self.tried: list[str] = []
        self.looks = 0
        self._moved = clock

    async def due_schedules(self, limit: int, **without: Any) -> list[DueSchedule]:
        self.looks += 1
        return await super().due_schedules(limit, **without)

    async def decide_slots(self, decision: SlotDecision, **_: Any) -> list[UUID] | None:
        self.tried.append(decision.name)
        if decision.name in self.locked:
            self._moved.now += self.waits
            raise StoreBusy("held")
        return await super().decide_slots(decision)


class _Bench:
    def __init__(self, clock: MovedClock) -> None:
        self.clock = clock
        self.store = _Store(clock)
        self.firing = Firing(self.store, lambda number: [uuid4() for _ in range(number)])

    async def plan(self, *names: str) -> None:
        await self.store.register_schedules("shop", [a_schedule(name) for name in names])
        while await self.firing(LEADERSHIP) is True:
            pass
        self.clock.now += 60
        self.store.tried.clear()

    async def turn(self) -> bool | float:
        return await self.firing(LEADERSHIP)

    async def work(self, seconds: float) -> None:
        """Be a leader for so long."""
        until = self.clock.now + seconds
        while self.clock.now < until:
            wait = await self.turn()
            self.clock.now += 0.01 if wait is True else wait or NOTICE_EVERY

    async def slots(self, name: str) -> list[tuple[str, str | None]]:
        return [(one.state, one.reason) for one in reversed(await self.store.slots(name, 100))]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> _Bench:
    clock = MovedClock()
    monkeypatch.setattr(schedules_module, "time", clock)
    return _Bench(clock)


async def test_one_that_is_held_is_tried_again_soon_and_told_once(
    bench: _Bench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    await bench.plan("a", "b")
    bench.store.locked = {"a"}

    await bench.work(10)
    bench.store.locked = ()
    await bench.work(HELD_AGAIN + 0.1)

    assert [state for state, _ in await bench.slots("a")] == ["fired"]
    assert bench.store.tried.count("b") == 1
    assert 10 < bench.store.tried.count("a") <= 10 / HELD_AGAIN + 2
    told = [one.getMessage() for one in caplog.records if "schedule.held" in one.getMessage()]
    assert len(told) == 1
    assert "schedule=a" in told[0]


async def test_one_that_is_held_for_a_moment_is_not_told(
    bench: _Bench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    await bench.plan("a")
    bench.store.locked = {"a"}

    await bench.work(HELD_TOLD / 2)
    bench.store.locked = ()
    await bench.work(HELD_TOLD)

    assert [state for state, _ in await bench.slots("a")] == ["fired"]
    assert "schedule.held" not in caplog.text


async def test_what_was_missed_since_it_was_held_says_so(bench: _Bench) -> None:
    await bench.plan("a")
    bench.store.locked = {"a"}

    await bench.work(150)
    bench.store.locked = ()
    await bench.work(1)

    skipped, fired = await bench.slots("a")
    reason = "held by another transaction; the last one alone is caught up with"
    assert skipped == ("skipped", reason)
    assert fired == ("fired", None)


async def test_what_was_missed_before_it_was_held_says_so(bench: _Bench) -> None:
    await bench.plan("a")
    bench.clock.now += 600  # no leader
    bench.store.locked = {"a"}

    await bench.work(2)
    bench.store.locked = ()
    await bench.work(1)

    (skipped, _) = await bench.slots("a")
    assert skipped == ("skipped", "missed; the last one alone is caught up with")


async def test_however_many_are_held_for_however_long_the_others_are_fired(bench: _Bench) -> None:
    held = [f"a{number:03}" for number in range(2 * BATCH + 50)]
    await bench.plan(*held, "b")
    bench.store.locked = held

    await bench.work(3)
    before = bench.store.tried.count("b")
    await bench.work(120)

    assert before == 1
    assert [state for state, _ in await bench.slots("b")] == ["fired"] * 3


async def test_what_is_waited_for_leaves_time_for_other_duties(bench: _Bench) -> None:
    held = [f"a{number}" for number in range(50)]
    await bench.plan(*held, "b")
    bench.store.locked, bench.store.waits = held, 0.1
    began = bench.clock.now

    wait = await bench.turn()

    assert bench.clock.now - began < 0.5
    assert 0 < wait < 0.5
    await bench.work(30)
    assert [state for state, _ in await bench.slots("b")] == ["fired"]


async def test_one_that_is_not_due_any_more_is_not_held_either(
    bench: _Bench, caplog: pytest.LogCaptureFixture
) -> None:
    await bench.plan("a")
    bench.store.locked = {"a"}
    await bench.work(0.6)
    await bench.store.pause_schedule("a")
    await bench.work(10)
    await bench.store.resume_schedule("a")

    await bench.work(0.6)

    assert "schedule.held" not in caplog.text


async def test_one_that_is_refused_is_tried_again_every_minute_and_keeps_out_no_others(
    bench: _Bench, caplog: pytest.LogCaptureFixture
) -> None:
    here = a_schedule("b")
    mars = replace(here, timing=Timing(cron="* * * * *", timezone="Mars"))
    refused = [replace(mars, name=f"a{number:03}") for number in range(BATCH + 50)]
    await bench.store.register_schedules("shop", [*refused, here])

    await bench.work(130)

    assert [state for state, _ in await bench.slots("b")] == ["fired"] * 2
    assert bench.store.looks < 200
    assert caplog.text.count("schedule.refused schedule=a000") == 1


async def test_one_that_was_refused_is_tried_at_once_when_it_was_changed(bench: _Bench) -> None:
    here = a_schedule("a")
    mars = Timing(cron="* * * * *", timezone="Mars")
    await bench.store.register_schedules("shop", [replace(here, timing=mars)])
    await bench.turn()
    await bench.store.register_schedules("shop", [here])

    bench.firing.look_again()
    await bench.turn()

    assert bench.store.tried == ["a"]
