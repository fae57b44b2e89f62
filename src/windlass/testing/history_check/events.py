"""What happened in a run, as the checker sees it: one frozen class per fact."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A committed change in the database. Times are seconds since 1970 by the database's clock."""

    n: int  # grows, but not in the order of commits: see the package
    at: float  # after whatever the change waited for, before its commit
    began: float = 0.0  # its transaction


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskEvent(Event):
    """A change of one task."""

    task: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Born(TaskEvent):
    """A task came to be, or was opened again after its end."""

    type: str
    queue: str
    due: float
    max_attempts: int
    generation: int = 1
    attempts: int = 0
    key: str | None = None
    intent: str | None = None
    is_reopened: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed(TaskEvent):
    """A waiting task was given another time or queue."""

    queue: str
    due: float
    generation: int
    attempts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed(TaskEvent):
    """A row was added to a place where tasks wait, or taken from it."""

    place: Literal["ready", "scheduled"]
    is_there: bool
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed(TaskEvent):
    """A task was granted to a worker."""

    token: str
    generation: int
    worker: str
    fence: int
    granted_at: float
    expires_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned(TaskEvent):
    """A claimed task came back: by its worker, who shows its token, or by a rescue."""

    generation: int  # the new one
    attempts: int
    due: float
    token: str | None
    is_attempt_noted: bool  # a failed attempt was written down with it
    was_running: bool  # it had been reported as running, and this took the report back
    term: int | None = None  # of a rescue: that of the seat it held


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended(TaskEvent):
    """A task came to rest."""

    place: Literal["history", "dead"]
    state: str
    generation: int
    attempts: int
    max_attempts: int
    token: str | None
    worker: str | None  # without a token: it was rescued from this one
    was_live: bool  # its live row went in the same transaction
    was_running: bool = False
    term: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Vanished(TaskEvent):
    """A live task's row went and the task rests nowhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forgotten(TaskEvent):
    """An ended task was removed: its time was over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extended(Event):
    """A heartbeat prolonged a claim."""

    token: str
    expires_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Led(Event):
    """The seat was taken, kept or left."""

    term: int
    holder: str
    expires_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulsed(Event):
    """A worker gave a sign of life."""

    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered(Event):
    """A worker entered the registry or left it."""

    worker: str
    pid: int
    is_there: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """An enqueue, as its caller saw it. Times are those of the caller's clock."""

    intent: str
    type: str
    key: str | None = None
    outcome: Literal["ok", "fail", "unknown"] = "unknown"
    task: str | None = None  # that the answer named
    began: float = 0.0
    ended: float = inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """A queue that nothing may be claimed from: from the answer to one call to the begin of another."""

    queue: str
    since: float
    until: float = inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A handler that was called; one whose process died has no end."""

    task: str
    attempt: int
    fence: int
    worker: str
    pid: int
    began: float
    ended: float | None = None
    outcome: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """All that is known of a run."""

    events: Sequence[Event]
    calls: Sequence[Call] = ()
    pauses: Sequence[Pause] = ()
    runs: Sequence[Run] = ()
    places: Mapping[str, frozenset[str]] = field(
        default_factory=dict
    )  # where each task is in the end


@dataclass(frozen=True, slots=True)
class Violation:
    """A promise that was not kept, and what shows it."""

    rule: str
    task: str | None
    says: str
    shown_by: tuple[object, ...] = ()

    def __str__(self) -> str:
        shown = "".join(f"\n    {event}" for event in self.shown_by)
        return f"{self.rule} task {self.task}: {self.says}{shown}"
