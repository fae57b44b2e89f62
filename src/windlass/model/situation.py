"""What a store finds out about one task, for whoever says why it is not running."""

import math
from dataclasses import dataclass
from datetime import datetime

from windlass.model.explanation import GateHolder, Holder
from windlass.model.rule import LaneRule, RuleScope
from windlass.model.task import TaskRecord, WorkerRecord

COUNTED = 10_000  # tasks that come first; no more are counted
HOLDERS = 5  # of a limit; no more are named
LATELY = 60.0  # seconds of which completions are counted
SNOOZED = "its handler snoozed it"


@dataclass(frozen=True, slots=True)
class LimitState:
    """A limit at a moment."""

    rule: LaneRule
    room: int  # how many more it lets through
    used: int
    tokens: float | None  # of its rate
    holders: tuple[Holder, ...] = ()  # some, if the task counts for it

    @property
    def key(self) -> tuple[RuleScope, str]:
        """Whose limit it is."""
        return self.rule.key


@dataclass(frozen=True, slots=True)
class LaneState:
    """A lane that a claim reads: one that has a limit, or one of suspects if the task is one."""

    queue: str
    type: str
    tasks: int  # as many as its limits let through, and `COUNTED`, may be all that were counted
    is_own: bool = False
    or_more: bool = False  # its limits let more through than were counted, and there are more

    @property
    def keys(self) -> tuple[tuple[RuleScope, str], ...]:
        """The limits that its tasks count for, if there are any."""
        return (RuleScope.QUEUE, self.queue), (RuleScope.TYPE, self.type)


@dataclass(frozen=True, slots=True)
class GateState:
    """A gate at which a task waits, or will."""

    type: str | None  # None: that of an ordering key
    name: str  # that key, or the value
    slots: int | None  # how many may be let through at once; None: any number
    used: int
    first: int  # waiting ones that come before it; one more than `COUNTED`: not all were counted
    rate: float | None = None
    tokens: float | None = None
    holders: tuple[GateHolder, ...] = ()  # some of those that were let through

    @property
    def has_room(self) -> bool:
        """Whether the task is let through by whoever looks."""
        is_free = self.slots is None or self.used + self.first < self.slots
        return is_free and (self.tokens is None or math.floor(self.tokens + 1e-6) > self.first)


@dataclass(frozen=True, slots=True)
class Suspects:
    """Those that run alone, if the task is one of them."""

    number: int  # no more are counted than tell an outage
    first_recoveries: int  # of the one that is claimed first


@dataclass(frozen=True, slots=True)
class Ahead:
    """What comes before a task that is ready."""

    in_lane: int = 0
    elsewhere: int = 0
    or_more: bool = False  # not all were counted
    completed: int = 0  # of late, of the lanes that are read by workers that handle it
    completed_since: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """One task and all that a claim would ask about it, at one moment."""

    now: datetime
    record: TaskRecord
    recoveries: int = 0
    is_listed: bool = True
    lease_until: datetime | None = None
    cancel_reason: str | None = None
    expires_at: datetime | None = None
    put_off: str | None = None  # why it waits for its time, if it was
    queue_paused_at: datetime | None = None
    type_paused_at: datetime | None = None
    workers: tuple[WorkerRecord, ...] = ()  # that are alive
    limits: tuple[LimitState, ...] = ()
    lanes: tuple[LaneState, ...] = ()  # most urgent first
    suspects: Suspects | None = None
    ahead: Ahead = Ahead()
    gate: GateState | None = None  # at which it waits
    next_gate: GateState | None = None  # that of its value, if it has to pass something else before
