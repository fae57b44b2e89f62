"""Schedules: when tasks are enqueued by themselves, and what became of each time."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, NamedTuple
from uuid import UUID

from windlass.model.task import NewTask


class Overlap(StrEnum):
    """What to do with a slot while a task of an earlier one has not ended."""

    SKIP = "skip"
    QUEUE = "queue"  # it waits until that has ended
    ALLOW = "allow"


class SlotState(StrEnum):
    """What became of a slot."""

    FIRED = "fired"
    SKIPPED = "skipped"
    WAITING = "waiting"  # for the task of an earlier slot to end


class Timing(NamedTuple):
    """When the slots of a schedule are; either `cron` or `every` is given."""

    cron: str | None = None
    every: timedelta | None = None  # counted from the epoch, so that everybody agrees
    timezone: str = "UTC"  # of the cron expression


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A schedule as an application defines it."""

    name: str
    timing: Timing
    task: NewTask  # a template: its id is not used
    overlap: Overlap = Overlap.SKIP
    catch_up: int = 1  # how many missed slots are fired, the latest ones
    jitter: timedelta = timedelta(0)


class Stretch(NamedTuple):
    """A stretch of time: what comes after its begin, up to its end."""

    begin: datetime
    end: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class DueSchedule:
    """A schedule that wants a decision, with all that it depends on, as of one moment."""

    schedule: Schedule
    revision: int  # fences the decision: it grows with every change of the schedule
    decided_until: datetime  # slots up to here are done with
    now: datetime
    settled: tuple[Stretch, ...] = ()  # no slot of these is decided on again, in order
    paused_at: datetime | None = None  # it was paused from then on,
    resumed_at: datetime | None = None  # until then
    live_task: UUID | None = None  # the latest one of it that has not ended
    waiting: tuple[datetime, ...] = ()  # slots that wait, first one first


class Slot(NamedTuple):
    """What is to be written of a slot, or of several in a row that are skipped for one reason."""

    at: datetime  # of several: the last one
    state: SlotState
    task: NewTask | None = None  # what is enqueued with it
    reason: str | None = None
    first_at: datetime | None = None  # of several
    slots: int = 1  # how many


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotDecision:
    """What becomes of the slots of a schedule up to now, and when to look again."""

    name: str
    revision: int
    decided_until: datetime  # as it was read: another decision since then makes this one void
    until: datetime
    next_at: datetime | None  # None: never
    settled: tuple[Stretch, ...] = ()
    repeats_until: datetime | None = None  # the clock was set back: slots up to here are done with
    slots: tuple[Slot, ...] = ()
    released: tuple[Slot, ...] = ()  # slots that waited, and are fired now


class ScheduleChanges(NamedTuple):
    """What a registration has changed, by name."""

    added: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    retired: tuple[str, ...] = ()
    taken_over: tuple[str, ...] = ()  # from another application


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotRecord:
    """What became of a slot, for people."""

    slot_at: datetime
    state: SlotState
    decided_at: datetime
    task_id: str | None = None
    reason: str | None = None
    first_at: datetime | None = None
    slots: int = 1
    on_request: bool = False  # somebody ran the schedule by hand


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleRecord:
    """A schedule as people see it."""

    name: str
    owner: str  # the application that defines it
    type: str
    payload: dict[str, Any]
    queue: str
    cron: str | None
    every: float | None  # seconds
    timezone: str
    overlap: Overlap
    catch_up: int
    jitter: float  # seconds
    paused_at: datetime | None
    registered_at: datetime
    last_fired: SlotRecord | None
    last_skipped: SlotRecord | None
    next_slots: tuple[datetime, ...] = ()

    @property
    def timing(self) -> Timing:
        """When its slots are."""
        every = None if self.every is None else timedelta(seconds=self.every)
        return Timing(self.cron, every, self.timezone)
