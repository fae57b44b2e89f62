"""Which slots are fired, and which are skipped: decided from values alone."""

import random
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any
from uuid import UUID, uuid4

import pytest

from windlass.model.schedule import (
    DueSchedule,
    Overlap,
    Schedule,
    Slot,
    SlotState,
    Stretch,
    Timing,
)
from windlass.model.task import NewTask
from windlass.policy.schedule import COUNTED, STRETCHES, decide, jittered, next_slot, passed

NOON = datetime(2026, 11, 18, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
HOUR = 60 * MINUTE
FIRED, SKIPPED, WAITING = SlotState.FIRED, SlotState.SKIPPED, SlotState.WAITING
EVERY_SECOND = (Timing(every=timedelta(seconds=1)), Timing(cron="* * * * * *"))
EVERY_MINUTE = (Timing(every=MINUTE), Timing(cron="* * * * *"))


def new_ids(number: int) -> list[UUID]:
    return [uuid4() for _ in range(number)]


def a_schedule(timing: Timing, **options: Any) -> Schedule:
    return Schedule(name="a", timing=timing, task=NewTask(UUID(int=0), "t", "{}"), **options)


def decided(
    since: datetime,
    now: datetime,
    timing: Timing,
    state: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Slot, ...]:
    due = DueSchedule(
        schedule=a_schedule(timing, **options),
        revision=1,
        decided_until=since,
        now=now,
        **(state or {}),
    )
    return decide(due, new_ids).slots


def summary(slots: tuple[Slot, ...]) -> list[tuple[SlotState, int]]:
    return [(slot.state, slot.slots) for slot in slots]


@pytest.mark.parametrize("timing", EVERY_MINUTE)
@pytest.mark.parametrize(
    ("catch_up", "expected"),
    [
        (0, [(SKIPPED, 59), (FIRED, 1)]),
        (1, [(SKIPPED, 59), (FIRED, 1)]),
        (3, [(SKIPPED, 57), *[(FIRED, 1)] * 3]),
        (100, [(FIRED, 1)] * 60),
    ],
)
def test_the_latest_missed_slots_are_fired(
    timing: Timing, catch_up: int, expected: list[tuple[SlotState, int]]
) -> None:
    slots = decided(NOON - HOUR, NOON, timing, catch_up=catch_up, overlap=Overlap.ALLOW)

    assert summary(slots) == expected
    assert slots[-1].at == NOON
    assert len({slot.at for slot in slots}) == len(slots)


def test_a_slot_that_is_late_by_less_than_a_minute_is_not_missed() -> None:
    hourly = Timing(every=HOUR)
    late = decided(NOON - MINUTE, NOON + MINUTE, hourly, catch_up=0)
    too_late = decided(NOON - MINUTE, NOON + 2 * MINUTE, hourly, catch_up=0)

    assert summary(late) == [(FIRED, 1)]
    assert summary(too_late) == [(SKIPPED, 1)]


@pytest.mark.parametrize("timing", EVERY_SECOND)
def test_years_of_missed_slots_are_one_record(timing: Timing) -> None:
    slots = decided(NOON - timedelta(days=1000), NOON, timing)

    skipped, fired = slots
    assert (fired.at, fired.state) == (NOON, FIRED)
    assert skipped.at == NOON - timedelta(seconds=1)
    assert skipped.first_at == NOON - timedelta(days=1000) + timedelta(seconds=1)
    if timing.every:
        assert skipped.slots == 1000 * 86_400 - 1
    else:
        assert skipped.slots == COUNTED
        assert f"{COUNTED} slots or more" in (skipped.reason or "")


@pytest.mark.parametrize("timing", EVERY_MINUTE)
def test_an_overlapping_slot_names_the_task(timing: Timing) -> None:
    task_id = uuid4()

    (slot,) = decided(NOON - MINUTE, NOON, timing, {"live_task": task_id})

    assert slot.state is SKIPPED
    assert str(task_id) in (slot.reason or "")


def test_as_many_slots_wait_as_are_caught_up_with() -> None:
    slots = decided(
        NOON - 4 * MINUTE,
        NOON,
        EVERY_MINUTE[0],
        {"live_task": uuid4()},
        catch_up=2,
        overlap=Overlap.QUEUE,
    )

    assert summary(slots) == [(SKIPPED, 2), (WAITING, 1), (WAITING, 1)]


def test_slots_that_wait_are_fired_one_at_a_time_and_in_order() -> None:
    waiting = (NOON - 2 * MINUTE, NOON - MINUTE)
    due = DueSchedule(
        schedule=a_schedule(Timing(every=HOUR), overlap=Overlap.QUEUE, catch_up=2),
        revision=1,
        decided_until=NOON,
        now=NOON + MINUTE,
        waiting=waiting,
    )

    decision = decide(due, new_ids)

    assert [slot.at for slot in decision.released] == [waiting[0]]
    assert decision.next_at == NOON + MINUTE + timedelta(seconds=1)


def test_a_pause_is_told_apart_from_what_was_missed() -> None:
    state = {"paused_at": NOON - 30 * MINUTE, "resumed_at": NOON - 10 * MINUTE}

    slots = decided(NOON - HOUR, NOON, EVERY_MINUTE[0], state)

    assert summary(slots) == [(SKIPPED, 30), (SKIPPED, 20), (SKIPPED, 9), (FIRED, 1)]
    assert [slot.reason for slot in slots][1] == "paused"


def test_a_clock_that_was_set_back_decides_on_nothing() -> None:
    slots = decided(NOON + HOUR, NOON, EVERY_MINUTE[0])

    assert slots == ()


def replay(moments: list[datetime], timing: Timing, **options: Any) -> list[datetime]:
    """Decide at each of these moments, as a store would keep it without its slots; return what is fired."""
    schedule = a_schedule(timing, overlap=Overlap.ALLOW, **options)
    until, fired = moments[0], []
    settled: tuple[Stretch, ...] = ()
    for now in moments:
        due = DueSchedule(
            schedule=schedule, revision=1, decided_until=until, now=now, settled=settled
        )
        decision = decide(due, new_ids)
        until, settled = decision.until, decision.settled
        fired += [slot.at for slot in decision.slots if slot.state is FIRED]
    return fired


@pytest.mark.parametrize("timing", EVERY_MINUTE)
@pytest.mark.parametrize("catch_up", [0, 1, 5])
@pytest.mark.parametrize("seed", range(20))
def test_whatever_the_clock_does_no_slot_is_fired_twice(
    timing: Timing, catch_up: int, seed: int
) -> None:
    draw = random.Random(seed)
    moments = [NOON]
    for _ in range(200):
        step = draw.choice([10, 30, 60, 60, 60, 60, 300, -60, -3600, 3600, 40_000, -40_000])
        moments.append(moments[-1] + timedelta(seconds=step))

    fired = replay(moments, timing, catch_up=catch_up)

    assert len(set(fired)) == len(fired) > 10


def test_a_clock_that_was_ahead_and_is_set_right_fires_what_it_jumped_over() -> None:
    ahead = NOON + timedelta(days=365)
    there = [ahead + k * MINUTE for k in range(2000)]
    back = [NOON + k * MINUTE for k in range(1, 10)]

    fired = replay([NOON, *there, *back, *there], EVERY_MINUTE[0])

    assert fired == [*there, *back[1:]]  # from the moment on at which it was noticed


@pytest.mark.parametrize("timing", [Timing(every=24 * HOUR), Timing(cron="0 0 * * *")])
@pytest.mark.parametrize("catch_up", [0, 1, 3])
@pytest.mark.parametrize("late", [timedelta(0), timedelta(milliseconds=20)])
def test_a_clock_that_was_ahead_fires_the_last_that_it_jumped_over_too(
    timing: Timing, catch_up: int, late: timedelta
) -> None:
    day = 24 * HOUR
    days = [NOON.replace(hour=0) + k * day + late for k in range(1, 12)]

    fired = replay(
        [NOON, days[0], NOON + 7 * day, NOON + day, *days[1:]], timing, catch_up=catch_up
    )

    assert sorted(fired) == [one - late for one in days]


def test_a_clock_that_was_set_back_says_until_when_nothing_is_fired() -> None:
    due = DueSchedule(
        schedule=a_schedule(EVERY_MINUTE[0]),
        revision=1,
        decided_until=NOON,
        now=NOON - HOUR,
        settled=(Stretch(NOON - 24 * HOUR, NOON),),
    )

    assert decide(due, new_ids).repeats_until == NOON
    assert decide(replace(due, now=NOON - 30 * HOUR), new_ids).repeats_until is None
    assert decide(replace(due, now=NOON + HOUR), new_ids).repeats_until is None


def test_of_many_stretches_the_oldest_are_joined() -> None:
    outages = [NOON + k * HOUR for k in range(3 * STRETCHES)]
    settled: tuple[Stretch, ...] = ()
    for before, now in pairwise(outages):
        due = DueSchedule(
            schedule=a_schedule(EVERY_MINUTE[0]),
            revision=1,
            decided_until=before,
            now=now,
            settled=settled,
        )
        settled = decide(due, new_ids).settled

    assert len(settled) == STRETCHES
    moment = timedelta(microseconds=1)
    assert settled[0].begin == NOON + HOUR - moment
    assert settled[-1] == (outages[-1] - moment, outages[-1])


def test_intervals_are_counted_from_the_epoch() -> None:
    seven = Timing(every=timedelta(seconds=7))

    slot = next_slot(seven, NOON)

    assert slot is not None
    assert slot.timestamp() % 7 == 0
    assert 0 < (slot - NOON).total_seconds() <= 7
    assert next_slot(seven, slot) == slot + timedelta(seconds=7)


@pytest.mark.parametrize("timing", [Timing(every=7 * MINUTE), Timing(cron="*/7 * * * *")])
@pytest.mark.parametrize("most", [0, 1, 5, 1000])
def test_no_slot_is_counted_twice_or_left_out(timing: Timing, most: int) -> None:
    found = passed(timing, NOON - 24 * HOUR, NOON, most)
    everything = passed(timing, NOON - 24 * HOUR, NOON, 10_000)

    assert found.earlier + len(found.latest) == len(everything.latest)
    assert list(found.latest) == list(everything.latest)[found.earlier :]
    if found.earlier:
        assert (found.first, found.last) == (
            everything.latest[0],
            everything.latest[found.earlier - 1],
        )


def test_jitter_is_the_same_for_everybody_and_differs_by_slot() -> None:
    schedule = a_schedule(Timing(every=MINUTE), jitter=MINUTE)

    times = [jittered(schedule, NOON + k * MINUTE) - NOON - k * MINUTE for k in range(100)]

    assert times == [jittered(schedule, NOON + k * MINUTE) - NOON - k * MINUTE for k in range(100)]
    assert all(timedelta(0) <= one < MINUTE for one in times)
    assert len(set(times)) > 90
    assert min(times) < MINUTE / 5
    assert max(times) > MINUTE * 4 / 5
