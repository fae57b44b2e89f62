"""A leader does its chores while its term lasts, and not a moment longer."""

import asyncio
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest

from unit.moved_clock import MovedClock
from windlass.maintenance import chores as chores_module
from windlass.maintenance import leader as leader_module
from windlass.maintenance.chores import FIRE_SCHEDULES, Chore
from windlass.maintenance.leader import Leader
from windlass.model.errors import NotLeader, StoreUnavailable
from windlass.model.task import Leadership, Rescued
from windlass.service import Stop
from windlass.store.clock_watch import ClockWatch
from windlass.store.memory import MemoryStore

ME = UUID(int=1)
LEASE = timedelta(seconds=30)


class Seat:
    def __init__(self, answers: list[Leadership | None]) -> None:
        self.answers = answers
        self.is_gone = False
        self.asked: list[Leadership | None] = []
        self.resigned: list[Leadership] = []

    async def lead(self, candidate: UUID, **options: Any) -> Leadership | None:
        self.asked.append(options["current"])
        if self.is_gone:
            raise StoreUnavailable("gone")
        return self.answers.pop(0) if self.answers else Leadership(ME, 9)

    async def resign(self, leadership: Leadership) -> None:
        self.resigned.append(leadership)


def leader(seat: Seat, *chores: Chore, term: float = 0.3) -> Leader:
    clock = ClockWatch(lease=LEASE, heartbeat=LEASE / 3)
    lasts = timedelta(seconds=term)
    return Leader(store=seat, candidate=ME, term=lasts, clock=clock, chores=chores)


async def test_who_is_not_elected_does_nothing_and_asks_again() -> None:
    seat = Seat([None, None, Leadership(ME, 4)])
    stop = Stop()
    done: list[int] = []

    async def chore(leadership: Leadership) -> bool:
        done.append(leadership.term)
        stop.set()
        return False

    await asyncio.wait_for(leader(seat, Chore("a", 60, chore)).run(stop), 10)

    assert done == [4]
    assert seat.asked == [None, None, None]
    assert seat.resigned == [Leadership(ME, 4)]


async def test_a_deposed_leader_stops_and_stands_again() -> None:
    seat = Seat([Leadership(ME, 4), Leadership(ME, 6)])
    stop = Stop()
    done: list[int] = []

    async def chore(leadership: Leadership) -> bool:
        done.append(leadership.term)
        if leadership.term == 4:
            raise NotLeader("over")
        stop.set()
        return False

    await asyncio.wait_for(leader(seat, Chore("a", 0, chore)).run(stop), 10)

    assert done == [4, 6]
    assert seat.asked == [None, None]


async def test_a_chore_that_fails_or_hangs_does_not_stop_the_others() -> None:
    seat = Seat([Leadership(ME, 1)])
    stop = Stop()
    done: list[str] = []

    async def fails(_: Leadership) -> bool:
        done.append("fails")
        raise ValueError("no")

    async def hangs(_: Leadership) -> bool:
        done.append("hangs")
        await asyncio.Event().wait()
        return False

    async def works(_: Leadership) -> bool:
        done.append("works")
        stop.set()
        return False

    chores = [Chore("fails", 60, fails), Chore("hangs", 60, hangs), Chore("works", 60, works)]
    await asyncio.wait_for(leader(seat, *chores).run(stop), 10)

    assert done == ["fails", "hangs", "works"]


async def test_schedules_are_looked_at_at_once_when_there_is_another() -> None:
    seat = Seat([Leadership(ME, 1)])
    stop = Stop()
    looks: list[str] = []

    async def fire(_: Leadership) -> bool:
        looks.append("fire")
        if len(looks) == 2:  # while it is under way, too
            candidate.look_at_schedules()
        elif len(looks) == 4:
            asyncio.get_running_loop().call_soon(candidate.look_at_schedules)
        else:
            stop.set()
        return False

    async def other(_: Leadership) -> bool:
        looks.append("other")
        return False

    candidate = leader(
        seat,
        Chore("other", 3600, other),
        Chore(FIRE_SCHEDULES, 3600, fire, look_again=lambda: looks.append("anew")),
        term=3600,
    )
    await asyncio.wait_for(candidate.run(stop), 10)

    assert looks == ["other", "fire", "anew", "fire", "anew", "fire"]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> MovedClock:
    clock = MovedClock()
    monkeypatch.setattr(leader_module, "time", clock)
    monkeypatch.setattr(chores_module, "time", clock)
    return clock


async def test_a_term_is_counted_from_asking_and_trusted_for_nine_tenths(
    clock: MovedClock,
) -> None:
    class SlowSeat(Seat):
        async def lead(self, candidate: UUID, **options: Any) -> Leadership | None:
            clock.now += 0.2
            return await super().lead(candidate, **options)

    asked_at = clock.now
    candidate = leader(SlowSeat([Leadership(ME, 4)]))
    await candidate._elect()

    clock.now = asked_at + 0.26
    assert candidate.is_leader
    clock.now = asked_at + 0.28
    assert not candidate.is_leader


async def test_an_outage_ends_no_term_before_its_time(clock: MovedClock) -> None:
    seat = Seat([Leadership(ME, 4)])
    candidate = leader(seat)
    await candidate._elect()
    seat.is_gone = True
    clock.now += 0.2
    await candidate._elect()

    assert candidate.is_leader
    clock.now += 0.08
    assert not candidate.is_leader


async def test_a_term_is_renewed_after_a_third_of_it_however_much_there_is_to_do(
    clock: MovedClock,
) -> None:
    seat = Seat([Leadership(ME, 4), Leadership(ME, 4)])
    stop = Stop()
    asked: list[int] = []

    async def chore(_: Leadership) -> bool:
        asked.append(len(seat.asked))
        clock.now += 0.11
        if len(asked) == 2:
            stop.set()
        return True

    await asyncio.wait_for(leader(seat, Chore("a", 0, chore)).run(stop), 10)

    assert asked == [1, 2]
    assert seat.asked == [None, Leadership(ME, 4)]


async def test_no_chore_is_begun_after_a_stop() -> None:
    seat = Seat([Leadership(ME, 4)])
    stop = Stop()
    done: list[str] = []

    async def first(_: Leadership) -> bool:
        done.append("first")
        stop.set()
        return False

    async def second(_: Leadership) -> bool:
        done.append("second")
        return False

    chores = [Chore("first", 60, first), Chore("second", 60, second)]
    await asyncio.wait_for(leader(seat, *chores).run(stop), 10)

    assert done == ["first"]


async def test_a_leader_whose_chore_hangs_again_and_again_leaves_the_seat_to_others() -> None:
    seat = Seat([Leadership(ME, 4), Leadership(ME, 4), None])
    stop = Stop()
    begun: list[int] = []

    async def hangs(leadership: Leadership) -> bool:
        begun.append(leadership.term)
        await asyncio.Event().wait()
        return False

    async def look(_: Leadership) -> bool:
        if seat.resigned:
            stop.set()
        return False

    candidate = leader(seat, Chore("hangs", 0, hangs), Chore("look", 0, look))
    await asyncio.wait_for(candidate.run(stop), 10)

    # Twice under its first term; then it stood aside, lost an election, and won the next.
    assert begun[:2] == [4, 4]
    assert seat.resigned[0] == Leadership(ME, 4)
    assert seat.answers == []


async def test_a_chore_that_is_no_duty_deposes_nobody_however_often_it_hangs() -> None:
    seat = Seat([Leadership(ME, 4)] * 5)
    stop = Stop()
    begun: list[int] = []

    async def hangs(leadership: Leadership) -> bool:
        begun.append(leadership.term)
        if len(begun) == 4:
            stop.set()
        await asyncio.Event().wait()
        return False

    await asyncio.wait_for(leader(seat, Chore("hangs", 0, hangs, is_duty=False)).run(stop), 10)

    assert begun == [4] * 4
    assert None not in seat.asked[1:]  # it renewed its term each time, and had never resigned


async def test_a_chore_that_hung_once_deposes_nobody() -> None:
    seat = Seat([Leadership(ME, 4)])
    stop = Stop()
    begun: list[str] = []

    async def slow(_: Leadership) -> bool:
        begun.append("slow")
        if len(begun) % 2:
            await asyncio.Event().wait()
        elif len(begun) == 6:
            stop.set()
        return False

    await asyncio.wait_for(leader(seat, Chore("slow", 0, slow)).run(stop), 10)

    assert seat.resigned == [Leadership(ME, 9)]  # at the end


async def test_nothing_is_begun_once_the_term_may_not_be_trusted(clock: MovedClock) -> None:
    seat = Seat([Leadership(ME, 4)])
    done: list[str] = []

    async def takes_long(_: Leadership) -> bool:
        done.append("long")
        clock.now += 0.28
        return False

    async def next_one(_: Leadership) -> bool:
        done.append("next")
        return False

    candidate = leader(seat, Chore("long", 60, takes_long), Chore("next", 60, next_one))
    await candidate._elect()
    await candidate._do_chores(Stop())

    assert done == ["long"]


class WaitsNotedStop(Stop):
    """Notes for how long it is waited for, and lets nobody wait."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float | None] = []

    async def wait(self, seconds: float | None = None) -> bool:
        self.waits.append(seconds)
        if len(self.waits) == 20:
            self.set()
        return bool(self)


async def test_who_is_not_elected_asks_again_within_a_third_of_a_term() -> None:
    """So that a new leader is there within the term and a third of it, and not all ask at once."""
    stop = WaitsNotedStop()
    await leader(Seat([None] * 20)).run(stop)

    assert len(set(stop.waits)) > 1
    assert all(seconds is not None and 0.05 < seconds <= 0.1 for seconds in stop.waits)


async def test_an_election_that_is_not_answered_is_given_up_and_asked_for_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class SilentSeat(Seat):
        async def lead(self, candidate: UUID, **options: Any) -> Leadership | None:
            self.asked.append(options["current"])
            if len(self.asked) == 1:
                await asyncio.Event().wait()
            stop.set()
            return None

    stop = Stop()
    seat = SilentSeat([])
    await asyncio.wait_for(leader(seat).run(stop), 10)

    assert len(seat.asked) == 2
    assert "store.unavailable doing=lead error=StoreUnavailable: the store gave no answer" in (
        caplog.text
    )


async def test_a_resignation_that_is_not_answered_does_not_hold_up_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class SilentSeat(Seat):
        async def resign(self, leadership: Leadership) -> None:
            await asyncio.Event().wait()

    stop = Stop()

    async def chore(_: Leadership) -> bool:
        stop.set()
        return False

    seat = SilentSeat([Leadership(ME, 4)])
    await asyncio.wait_for(leader(seat, Chore("a", 60, chore)).run(stop), 10)

    assert "store.unavailable doing=resign" in caplog.text


async def test_who_stepped_down_stands_aside_while_the_others_ask(clock: MovedClock) -> None:
    seat = Seat([Leadership(ME, 4)])
    candidate = leader(seat)
    await candidate._elect()
    await candidate._step_down(Chore("hangs", 0, _nothing))
    stop = WaitsNotedStop()
    await candidate.run(stop)

    assert seat.asked == [None]  # it has not asked again: the clock stands still
    clock.now += 0.2
    seat.answers = [None] * 20
    await candidate.run(WaitsNotedStop())
    assert len(seat.asked) > 1


async def _nothing(_: Leadership) -> bool:
    return False


class _Rescuing(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.rescues = 0

    async def rescue(self, limit: int, *, leadership: Leadership | None = None) -> Rescued:
        self.rescues += 1
        return await super().rescue(limit, leadership=leadership)


@pytest.mark.parametrize("is_believed", [True, False])
async def test_nothing_is_rescued_while_the_clock_is_in_doubt(
    monkeypatch: pytest.MonkeyPatch, is_believed: bool
) -> None:
    async def look(_: object) -> bool:
        return is_believed

    store, watch = _Rescuing(), ClockWatch(lease=LEASE, heartbeat=LEASE / 3)
    monkeypatch.setattr(watch, "look", look)
    held = await store.lead(ME, current=None, term=timedelta(seconds=15))
    assert held is not None
    (rescue,) = [one for one in chores_module.chores(store, watch, sweep=5) if one.name == "rescue"]
    await rescue.run(held)

    assert store.rescues == (1 if is_believed else 0)


async def test_a_candidate_and_the_chore_of_lost_workers_show_how_long_the_clock_was_steady(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown: list[timedelta] = []

    class Watched(MemoryStore):
        async def lead(self, candidate: UUID, **options: Any) -> Leadership | None:
            shown.append(options["steady_for"])
            return await super().lead(candidate, **options)

        async def remove_dead_workers(self, **options: Any) -> list[UUID]:
            shown.append(options["steady_for"])
            return await super().remove_dead_workers(**options)

    async def look(*_: object) -> bool:
        return True

    monkeypatch.setattr(ClockWatch, "steady_for", timedelta(seconds=7))
    monkeypatch.setattr(ClockWatch, "look", look)
    store, clock, stop = Watched(), ClockWatch(lease=LEASE, heartbeat=LEASE / 3), Stop()
    (chore,) = [
        each
        for each in chores_module.chores(store, clock, sweep=5)
        if each.name == "remove-workers"
    ]
    doing = chore.call

    async def once(leadership: Leadership) -> bool | float:
        stop.set()
        return await doing(leadership)

    chore.call = once
    term = timedelta(seconds=15)
    await Leader(store=store, candidate=ME, term=term, clock=clock, chores=[chore]).run(stop)

    assert shown == [timedelta(seconds=7)] * 2
