"""Which slots of a schedule are fired, which are skipped, and why."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from uuid import UUID

from windlass.model.errors import ConfigurationError
from windlass.model.limits import HELD, MISSED, PAUSED
from windlass.model.schedule import (
    DueSchedule,
    Overlap,
    Schedule,
    Slot,
    SlotDecision,
    SlotState,
    Stretch,
    Timing,
)
from windlass.model.task import NewTask
from windlass.policy.cron import parse_cron

ON_TIME = timedelta(seconds=60)  # a slot that is no older was not missed: leaders change
ALL = 100  # missed slots that `catch_up="all"` fires at most
COUNTED = 10_000  # skipped slots of a cron expression; if there are more it says so
ASK_AGAIN = timedelta(seconds=1)  # whether a task has ended that a slot waits for
STRETCHES = 10  # that are told apart; a gap between older ones is forgotten

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)

NewIds = Callable[[int], list[UUID]]


def slots_after(timing: Timing, moment: datetime) -> Iterator[datetime]:
    """Yield the slots after a moment, in order; they may end."""
    if timing.every is None:
        yield from parse_cron(timing.cron or "", timing.timezone).after(moment)
        return
    number = (moment - _EPOCH) // timing.every
    while True:
        number += 1
        try:
            yield _EPOCH + number * timing.every
        except OverflowError:
            return


def next_slot(timing: Timing, moment: datetime) -> datetime | None:
    """The first slot after a moment."""
    return next(slots_after(timing, moment), None)


def jittered(schedule: Schedule, slot: datetime) -> datetime:
    """When the task of a slot is due: the same, whoever asks."""
    digest = hashlib.sha256(f"{schedule.name}\0{slot.timestamp():.6f}".encode()).digest()
    part = int.from_bytes(digest[:8], "big")
    return slot + _MICROSECOND * ((schedule.jitter // _MICROSECOND) * part >> 64)


@dataclass(frozen=True, slots=True)
class Passed:
    """The slots of a stretch of time: the latest ones, and how many came before them."""

    earlier: int
    first: datetime | None  # of the earlier ones
    last: datetime | None
    latest: Sequence[datetime]
    counted_all: bool = True


def passed(timing: Timing, start: datetime, end: datetime, most: int) -> Passed:
    """The slots after `start` and up to `end`, the last `most` of them one by one."""
    if timing.every is not None:
        return _passed_interval(timing.every, start, end, most)
    latest = _latest(timing, start, end, most + 1)
    if len(latest) <= most:
        return Passed(0, None, None, latest)
    last, latest = latest[0], latest[1:]
    earlier = 0
    first = None
    for slot in slots_after(timing, start):
        first = first or slot
        earlier += 1
        if slot >= last or earlier > COUNTED:
            break
    return Passed(min(earlier, COUNTED), first, last, latest, earlier <= COUNTED)


def _latest(timing: Timing, start: datetime, end: datetime, most: int) -> list[datetime]:
    """The last slots, found by looking back further and further: there may be millions."""
    back = timedelta(minutes=1)
    while True:
        begin = max(start, end - back)
        found: list[datetime] = []
        for slot in slots_after(timing, begin):
            if slot > end:
                break
            found.append(slot)
        if len(found) >= most or begin == start:
            return found[len(found) - most :] if len(found) > most else found
        back *= 4


def _passed_interval(every: timedelta, start: datetime, end: datetime, most: int) -> Passed:
    before, until = (start - _EPOCH) // every, (end - _EPOCH) // every
    number = max(0, until - before)
    latest = [_EPOCH + k * every for k in range(until - min(number, most) + 1, until + 1)]
    earlier = number - len(latest)
    if not earlier:
        return Passed(0, None, None, latest)
    return Passed(
        earlier, _EPOCH + (before + 1) * every, _EPOCH + (before + earlier) * every, latest
    )


def decide(due: DueSchedule, new_ids: NewIds, *, was_held: bool = False) -> SlotDecision:
    """Say what becomes of every slot up to now. The same slots are never decided on differently by two.

    `was_held`: it could not be decided on before, since somebody held the schedule.
    """
    schedule, now = due.schedule, due.now
    is_set_back = now < due.decided_until
    slots: list[Slot] = []
    since = _until_resumed(due, slots)
    chosen = _caught_up(due, since, slots, HELD if was_held else MISSED)
    # What was passed over is not settled: a clock that had jumped ahead may come by again, and then it is fired.
    if not slots:
        begin = min(due.decided_until, now)
    else:
        begin = chosen[0] - _MICROSECOND if chosen else now
    settled = _with_stretch(due.settled, begin, now)
    gate = _Gate(due, new_ids)
    released = [gate.fire(at) for at in due.waiting if gate.is_free]
    waiting = len(due.waiting) - len(released)
    for at in chosen:
        slots.append(gate.decide(at, waiting))
        waiting += slots[-1].state is SlotState.WAITING
    next_at = next_slot(schedule.timing, now)
    if waiting:
        next_at = min(next_at or now + ASK_AGAIN, now + ASK_AGAIN)
    return SlotDecision(
        name=schedule.name,
        revision=due.revision,
        decided_until=due.decided_until,
        until=now,
        next_at=next_at,
        settled=settled,
        repeats_until=_end_of_stretch(settled, now) if is_set_back else None,
        slots=tuple(slots),
        released=tuple(released),
    )


def is_on_time(due: DueSchedule) -> bool:
    """Whether no slot is so late that it counts as missed."""
    first = next_slot(due.schedule.timing, due.decided_until)
    return first is None or due.now - first <= ON_TIME


def given_up(due: DueSchedule, reason: str) -> list[Slot]:
    """Say what becomes of the slots up to now of a schedule that is changed or retired: none is fired."""
    slots: list[Slot] = []
    try:
        since = _until_resumed(due, slots)
        return slots + _passed_over(due, since, due.now, reason)
    except ConfigurationError as error:  # its zone is not known here
        return [Slot(due.now, SlotState.SKIPPED, reason=f"{reason}, if one was due: {error}")]


def _until_resumed(due: DueSchedule, slots: list[Slot]) -> datetime:
    """Note what a pause has kept from being fired; return from when on slots are wanted."""
    since = min(due.decided_until, due.now)
    if due.paused_at is None:
        return since
    begin = max(since, min(due.paused_at, due.now))
    end = max(begin, min(due.resumed_at or due.now, due.now))
    slots += _passed_over(due, since, begin, PAUSED)
    slots += _passed_over(due, begin, end, "paused")
    return end


def _with_stretch(
    settled: Sequence[Stretch], begin: datetime, end: datetime
) -> tuple[Stretch, ...]:
    """Add a stretch, joined to those that it meets; of too many the oldest are joined."""
    if begin >= end:
        return tuple(settled)
    joined: list[Stretch] = []
    for one in sorted([*settled, Stretch(begin, end)]):
        if joined and one.begin <= joined[-1].end:
            joined[-1] = Stretch(joined[-1].begin, max(joined[-1].end, one.end))
        else:
            joined.append(one)
    surplus = max(0, len(joined) - STRETCHES)
    return (Stretch(joined[0].begin, joined[surplus].end), *joined[surplus + 1 :])


def _end_of_stretch(settled: Sequence[Stretch], moment: datetime) -> datetime | None:
    return next((one.end for one in settled if one.begin <= moment < one.end), None)


def _open(settled: Sequence[Stretch], since: datetime, until: datetime) -> list[Stretch]:
    """What is not settled between two moments."""
    found: list[Stretch] = []
    for begin, end in settled:
        if since < min(begin, until):
            found.append(Stretch(since, min(begin, until)))
        since = max(since, end)
    if since < until:
        found.append(Stretch(since, until))
    return found


def _passed_over(due: DueSchedule, since: datetime, until: datetime, reason: str) -> list[Slot]:
    """Note as skipped what is not settled between two moments."""
    return [
        slot
        for stretch in _open(due.settled, since, until)
        for slot in _skipped(passed(due.schedule.timing, *stretch, 0), reason)
    ]


def _caught_up(
    due: DueSchedule, since: datetime, slots: list[Slot], why: str
) -> Sequence[datetime]:
    """Choose the slots to fire, and note the others as skipped."""
    schedule, now = due.schedule, due.now
    reason = f"{why}; {_said(schedule.catch_up)} caught up with"
    # What is settled was later than this: nobody catches up with what came before.
    begin = max([since, *(min(one.end, now) for one in due.settled if one.begin < now)])
    slots += _passed_over(due, since, begin, reason)
    found = passed(schedule.timing, begin, now, max(1, schedule.catch_up))
    slots += _skipped(found, reason)
    if schedule.catch_up or not found.latest or now - found.latest[-1] <= ON_TIME:
        return found.latest
    (late,) = found.latest
    slots.append(Slot(late, SlotState.SKIPPED, reason=f"{why}; none is caught up with"))
    return ()


def _said(catch_up: int) -> str:
    if catch_up <= 1:
        return "the last one alone is" if catch_up else "none is"
    return f"the last {catch_up} alone are"


def _skipped(found: Passed, reason: str) -> list[Slot]:
    if found.last is None:
        return []
    if not found.counted_all:
        reason += f" ({COUNTED} slots or more)"
    first = found.first if found.earlier > 1 else None
    return [Slot(found.last, SlotState.SKIPPED, None, reason, first, found.earlier)]


class _Gate:
    """Lets slots through by the overlap policy, one after another."""

    def __init__(self, due: DueSchedule, new_ids: NewIds) -> None:
        self._schedule = due.schedule
        self._live = due.live_task
        self._new_ids = new_ids

    @property
    def is_free(self) -> bool:
        return self._schedule.overlap is Overlap.ALLOW or self._live is None

    def decide(self, at: datetime, waiting: int) -> Slot:
        """Fire a slot, let it wait, or skip it; `waiting`: how many wait before it."""
        if self.is_free and not waiting:
            return self.fire(at)
        if self._schedule.overlap is Overlap.SKIP:
            reason = f"task {self._live} of an earlier slot has not ended"
            return Slot(at, SlotState.SKIPPED, reason=reason)
        if waiting < max(1, self._schedule.catch_up):
            return Slot(at, SlotState.WAITING, reason=f"waits for task {self._live} to end")
        reason = f"task {self._live} has not ended, and {waiting} slots wait for it already"
        return Slot(at, SlotState.SKIPPED, reason=reason)

    def fire(self, at: datetime) -> Slot:
        (task_id,) = self._new_ids(1)
        self._live = task_id
        return Slot(at, SlotState.FIRED, _task(self._schedule, at, task_id))


def _task(schedule: Schedule, at: datetime, task_id: UUID) -> NewTask:
    due_at = jittered(schedule, at) if schedule.jitter else None
    return schedule.task._replace(id=task_id, at=due_at)
