"""Dead letters: tasks that ended as failed or dead, how they are found, and what may be done with them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, NamedTuple
from uuid import UUID

from windlass.model.errors import ConfigurationError
from windlass.model.failure import ErrorClass
from windlass.model.limits import shown
from windlass.model.task import TaskRecord, TaskState

DEAD_STATES = (TaskState.FAILED, TaskState.DEAD)

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_POSITION = re.compile(r"([0-9]{1,18})\.([0-9a-f]{32})")


@dataclass(frozen=True, slots=True)
class DeadFilter:
    """Which dead letters to find; `after` is the `rest` of the page before."""

    statuses: tuple[TaskState, ...] = ()  # none: both
    queue: str | None = None
    type: str | None = None
    error_class: str | None = None
    error: str | None = (
        None  # a regular expression, looked for in "Type: message" of the last error
    )
    ended_from: datetime | None = None
    ended_until: datetime | None = None
    unreplayed: bool = False  # only those that were not replayed since they ended
    depth_below: int | None = None  # only those before which there are fewer replays
    after: str | None = None
    limit: int = 50


@dataclass(frozen=True, slots=True)
class FoundDead:
    """A part of what was found, last ended first. There may be none of it although others fit."""

    ids: list[UUID]
    rest: str | None = None  # where the next part goes on, for the store alone; None: that was all
    looked_back_to: datetime | None = None  # until when, if it stopped looking before it had enough


@dataclass(frozen=True, slots=True)
class DeadLetter(TaskRecord):
    """A dead letter as people see it: the task with every attempt, and its lineage."""

    error_class: str = ErrorClass.UNKNOWN  # also if nothing is known of it
    depth: int = 0  # replays from the first of all ancestors to this task
    replayed_as: tuple[str, ...] = ()  # oldest first, since it ended last

    @classmethod
    def of(cls, record: TaskRecord, *, depth: int, replayed_as: tuple[str, ...]) -> "DeadLetter":
        """Return the record of a task with what is known of it as a dead letter."""
        known = {field.name: getattr(record, field.name) for field in fields(TaskRecord)}
        return cls(
            **known, error_class=class_of(record.errors), depth=depth, replayed_as=replayed_as
        )

    @property
    def error_type(self) -> str | None:
        """The type of its last error."""
        return self.errors[-1].get("type") if self.errors else None


def class_of(errors: Sequence[Mapping[str, Any]]) -> str:
    """The class of the last of these errors."""
    return (errors[-1].get("class") if errors else None) or ErrorClass.UNKNOWN


class Replay(NamedTuple):
    """A new task to be made of a dead letter."""

    ancestor: UUID
    id: UUID  # of the new task: whoever repeats a call makes no other
    delay: float = 0.0  # seconds
    payload: str | None = None  # a JSON object; None: as it was


class ReplayAnswer(StrEnum):
    """What became of a replay."""

    REPLAYED = "replayed"
    BEFORE = "before"  # it was replayed before, since it ended
    HELD = "held"  # by somebody else's transaction: nothing was done
    ABSENT = "absent"  # there is no such dead letter


class Replayed(NamedTuple):
    """The answer to a replay, and the task that it made, or that was made before."""

    answer: ReplayAnswer
    task_id: UUID | None = None


class DiscardAnswer(StrEnum):
    """What became of a dead letter that was to be discarded."""

    DISCARDED = "discarded"
    HELD = "held"  # by somebody else's transaction: nothing was done
    ABSENT = "absent"  # there is no such dead letter


class QueuedLetter(NamedTuple):
    """A dead letter that is to go, and the queue that it is of."""

    id: UUID
    queue: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRule:
    """Which dead letters the leader replays by itself, and when."""

    queue: str | None = None
    type: str | None = None
    error_class: str | None = None
    error: str | None = None
    after: timedelta = timedelta(minutes=10)  # its end
    times: int = 1  # along the lineage
    within: timedelta = timedelta(days=1)  # of the moment it is due: what is older is left alone

    def wanted(self, now: datetime, *, after: str | None, limit: int) -> DeadFilter:
        """What it replays at this moment; `after`: where an earlier look ended."""
        until = now - self.after
        return DeadFilter(
            queue=self.queue,
            type=self.type,
            error_class=self.error_class,
            error=self.error,
            ended_from=until - self.within,
            ended_until=until,
            unreplayed=True,
            depth_below=self.times,
            after=after,
            limit=limit,
        )

    def __str__(self) -> str:
        asked = {
            "queue": self.queue,
            "type": self.type,
            "error_class": self.error_class,
            "error": self.error,
        }
        return ",".join(f"{name}={value}" for name, value in asked.items() if value is not None)


def position_of(ended: datetime, task_id: UUID) -> str:
    """Where a page goes on behind this letter."""
    return f"{(ended - _EPOCH) // _MICROSECOND}.{task_id.hex}"


def parse_position(text: str) -> tuple[datetime, UUID]:
    """Return the letter behind which a page goes on, or raise."""
    match = _POSITION.fullmatch(text)
    try:
        if match is not None:
            return _EPOCH + int(match[1]) * _MICROSECOND, UUID(match[2])
    except OverflowError:
        pass  # a year that there is not
    raise ConfigurationError(
        f"position {shown(text)} is of no listing of dead letters; give what a page said, as it is"
    )
