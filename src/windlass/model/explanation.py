"""Why a task is not running: each reason a value of its own, and a sentence."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import ClassVar, NamedTuple
from uuid import UUID

from windlass.model.rule import RuleScope
from windlass.model.task import TaskState


class Cause(StrEnum):
    """What a task waits for its time for."""

    ASKED = "asked"  # whoever enqueued or changed it named the time
    RETRY = "retry"
    PUT_OFF = "put off"  # its handler snoozed it, or a breaker or the budget of retries did


class Holder(NamedTuple):
    """A task that counts for a limit, and who has it since when."""

    task_id: UUID
    worker_id: UUID
    since: datetime


class GateHolder(NamedTuple):
    """A task that a gate has let through, and where it is."""

    task_id: UUID
    status: TaskState
    worker_id: UUID | None = None
    until: datetime | None = None  # if it waits for its time

    def __str__(self) -> str:
        where = "" if self.worker_id is None else f" on worker {self.worker_id}"
        when = "" if self.until is None else f" until {_time(self.until)}"
        return f"{self.task_id} ({self.status}{where}{when})"


@dataclass(frozen=True, slots=True)
class Ended:
    """It has ended."""

    kind: ClassVar[str] = "ended"
    status: TaskState
    at: datetime
    because: str | None = None

    def __str__(self) -> str:
        why = f": {self.because}" if self.because else ""
        return f"it ended as {self.status} at {_time(self.at)}{why}"


@dataclass(frozen=True, slots=True)
class Running:
    """Its handler runs."""

    kind: ClassVar[str] = "running"
    worker_id: str
    since: datetime
    lease_until: datetime

    def __str__(self) -> str:
        return f"it runs since {_time(self.since)}, on worker {self.worker_id}"


@dataclass(frozen=True, slots=True)
class Buffered:
    """A worker has it and has not said that it runs: that is said after half a second."""

    kind: ClassVar[str] = "buffered"
    worker_id: str
    since: datetime
    lease_until: datetime

    def __str__(self) -> str:
        return (
            f"worker {self.worker_id} took it at {_time(self.since)}: it waits there for its turn, or began "
            f"just now; the lease holds until {_time(self.lease_until)} unless it is extended"
        )


@dataclass(frozen=True, slots=True)
class LeaseOver:
    """The worker that has it fell silent, and it has not been rescued yet."""

    kind: ClassVar[str] = "lease_over"
    worker_id: str
    since: datetime

    def __str__(self) -> str:
        return (
            f"worker {self.worker_id} had it and its lease is over since {_time(self.since)}; "
            "the leader takes it back, if a worker lives to lead"
        )


@dataclass(frozen=True, slots=True)
class CancellationAsked:
    """The worker that has it was asked to end it."""

    kind: ClassVar[str] = "cancellation_asked"
    because: str

    def __str__(self) -> str:
        return f"its cancellation was asked for: {self.because}"


@dataclass(frozen=True, slots=True)
class WaitsForTime:
    """It is not due, or was not promoted yet."""

    kind: ClassVar[str] = "waits_for_time"
    until: datetime
    cause: Cause
    is_due: bool = False
    error: str | None = None  # of the attempt that failed
    put_off: str | None = None  # why it was
    breakers: tuple[str, ...] = ()  # that hold up calls of workers that handle its type

    def __str__(self) -> str:
        if self.is_due:
            said = f"it is due since {_time(self.until)}, and is made ready by the next worker or leader that looks"
        else:
            said = f"it waits for its time, {_time(self.until)}"
        match self.cause:
            case Cause.RETRY:
                said += f"; it is a retry after: {self.error}"
            case Cause.PUT_OFF:
                said += f"; it was put off: {self.put_off}"
            case Cause.ASKED:
                pass
        if self.breakers:
            said += f"; not closed where its type is handled: {_listed(self.breakers)}"
        return said


@dataclass(frozen=True, slots=True)
class QueuePaused:
    """Its queue is paused."""

    kind: ClassVar[str] = "queue_paused"
    queue: str
    since: datetime

    def __str__(self) -> str:
        return f"queue '{self.queue}' is paused since {_time(self.since)}"


@dataclass(frozen=True, slots=True)
class TypePaused:
    """Its type is paused."""

    kind: ClassVar[str] = "type_paused"
    type: str
    since: datetime

    def __str__(self) -> str:
        return f"type '{self.type}' is paused since {_time(self.since)}"


@dataclass(frozen=True, slots=True)
class LimitReached:
    """As many tasks are held as its queue or type allows, or will be by those that come first."""

    kind: ClassVar[str] = "limit_reached"
    scope: RuleScope
    name: str
    concurrency: int
    used: int
    first: int  # waiting tasks that take what is left before it
    holders: tuple[Holder, ...] = ()  # some of them, the oldest claims first
    or_more: bool = False  # not all that come first were counted

    def __str__(self) -> str:
        said = f"{self.scope} '{self.name}' has {self.used} of {self.concurrency} tasks at once"
        if self.used < self.concurrency:
            first = _number(self.first, or_more=self.or_more)
            said += f", and what is left goes to others that come first ({first})"
        if self.holders:
            held = [f"{one.task_id} on worker {one.worker_id}" for one in self.holders]
            said += f"; held by {_listed(held)}"
            said += ", and others" if self.used > len(held) else ""
        return said


@dataclass(frozen=True, slots=True)
class RateLimited:
    """As many tasks began of late as its queue or type allows, or will by those that come first."""

    kind: ClassVar[str] = "rate_limited"
    scope: RuleScope
    name: str
    rate: float  # tasks in a second
    until: datetime  # when there are tokens for it, if nobody else comes
    first: int  # waiting tasks that take tokens before it
    or_more: bool = False  # not all of them were counted: it is later

    def __str__(self) -> str:
        return (
            f"{self.scope} '{self.name}' may begin {self.rate:g} tasks in a second: "
            f"{_earliest(self.until, self.first, or_more=self.or_more)}"
        )


@dataclass(frozen=True, slots=True)
class KeyHeld:
    """Another task of its ordering key was let through, or comes first."""

    kind: ClassVar[str] = "key_held"
    ordering_key: str
    first: int  # waiting tasks of this key that come before it
    holder: GateHolder | None = None
    or_more: bool = False  # not all that come before it were counted

    def __str__(self) -> str:
        said = f"ordering key '{self.ordering_key}' is held by "
        if self.holder is None:
            first = _number(self.first, or_more=self.or_more)
            return f"{said}the first of {first} that came before it"
        said += str(self.holder)
        if self.holder.status in (TaskState.FAILED, TaskState.DEAD):
            said += ", which keeps it until it is retried, replayed or discarded"
        others = _others(self.first, or_more=self.or_more)
        return f"{said}; {others} first" if self.first else said


@dataclass(frozen=True, slots=True)
class ValueLimitReached:
    """As many tasks of one value were let through as may be, or will be by those that come first."""

    kind: ClassVar[str] = "value_limit_reached"
    type: str
    value: str
    slots: int
    used: int
    first: int  # waiting tasks of this value that come before it
    holders: tuple[GateHolder, ...] = ()  # some of them
    or_more: bool = False  # not all that come before it were counted

    def __str__(self) -> str:
        said = f"type '{self.type}' has {self.used} of {self.slots} tasks of '{self.value}' at once"
        if self.first:
            said += f", {_others(self.first, or_more=self.or_more)} first"
        if self.holders:
            said += f"; held by {_listed([str(one) for one in self.holders])}"
            said += ", and others" if self.used > len(self.holders) else ""
        return said


@dataclass(frozen=True, slots=True)
class ValueRateLimited:
    """As many tasks of one value were let through of late as its rate allows."""

    kind: ClassVar[str] = "value_rate_limited"
    type: str
    value: str
    rate: float  # tasks in a second
    until: datetime  # when there are tokens for it
    first: int  # waiting tasks that take tokens before it
    or_more: bool = False  # not all of them were counted: it is later

    def __str__(self) -> str:
        return (
            f"type '{self.type}' may begin {self.rate:g} tasks of '{self.value}' in a second: "
            f"{_earliest(self.until, self.first, or_more=self.or_more)}"
        )


@dataclass(frozen=True, slots=True)
class GateCalled:
    """Nothing stands in its way, but nobody has looked since it came."""

    kind: ClassVar[str] = "gate_called"

    def __str__(self) -> str:
        return "it is let through by the next worker or leader that looks"


@dataclass(frozen=True, slots=True)
class RunsAlone:
    """Its workers were lost twice before it began, so it is run by itself."""

    kind: ClassVar[str] = "runs_alone"
    recoveries: int
    first: int  # other suspects that come before it
    is_next: bool
    or_more: bool = False  # not all of them were counted

    def __str__(self) -> str:
        said = f"it was recovered from {self.recoveries} lost workers, so it runs alone: a worker first finishes all else"
        first = _number(self.first, or_more=self.or_more)
        return f"{said}, and {first} others like it come first" if self.first else said


@dataclass(frozen=True, slots=True)
class NotListed:
    """It came into a lane that had been put to rest."""

    kind: ClassVar[str] = "not_listed"

    def __str__(self) -> str:
        return "its lane had rested for long; the leader lists it again within ten seconds"


@dataclass(frozen=True, slots=True)
class NobodyHandles:
    """No live worker handles its type and serves its queue."""

    kind: ClassVar[str] = "nobody_handles"
    type: str
    queue: str
    live: int  # workers
    handle_type: tuple[str, ...] = ()  # some of those that do
    serve_queue: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.live:
            return "no worker is alive"
        return (
            f"none of {self.live} live workers handles type '{self.type}' in queue '{self.queue}'; "
            f"the type is handled by {_listed(self.handle_type) or 'none'}, "
            f"the queue is served by {_listed(self.serve_queue) or 'none'}"
        )


@dataclass(frozen=True, slots=True)
class WorkersBusy:
    """Every live worker that handles it runs as many tasks as it can."""

    kind: ClassVar[str] = "workers_busy"
    workers: int
    running: int
    capacity: int

    def __str__(self) -> str:
        return (
            f"all workers that handle it are busy: {self.workers} of them, "
            f"with {self.running} tasks for {self.capacity} slots"
        )


@dataclass(frozen=True, slots=True)
class QueueBusy:
    """Every live worker that handles it and has a slot left runs as many of its queue as it is told to."""

    kind: ClassVar[str] = "queue_busy"
    queue: str
    workers: int  # that do so

    def __str__(self) -> str:
        return (
            f"no worker that handles it has room for queue '{self.queue}': {self.workers} of them "
            "run as many of its tasks as their own limit lets them"
        )


@dataclass(frozen=True, slots=True)
class Behind:
    """Others come first."""

    kind: ClassVar[str] = "behind"
    tasks: int
    or_more: bool = False  # not all were counted
    wait: timedelta | None = None  # by the rate of late; None: unknown

    def __str__(self) -> str:
        number = _number(self.tasks, or_more=self.or_more)
        plural = "" if number == "1" else "s"
        if self.wait is None:
            wait = "nobody knows how long: none of the kind completed in the last minute"
        else:
            at_least = "at least" if self.or_more else "about"
            wait = f"{at_least} {_span(self.wait)} at the rate of the last minute"
        return f"it is behind {number} task{plural}: {wait}"


@dataclass(frozen=True, slots=True)
class Expires:
    """It is cancelled unless it begins in time."""

    kind: ClassVar[str] = "expires"
    at: datetime
    is_over: bool

    def __str__(self) -> str:
        if self.is_over:
            return f"it should have begun by {_time(self.at)}, and is cancelled instead"
        return f"it is cancelled unless it begins by {_time(self.at)}"


Reason = (
    Ended
    | Running
    | Buffered
    | LeaseOver
    | CancellationAsked
    | WaitsForTime
    | QueuePaused
    | TypePaused
    | LimitReached
    | RateLimited
    | KeyHeld
    | ValueLimitReached
    | ValueRateLimited
    | GateCalled
    | RunsAlone
    | NotListed
    | NobodyHandles
    | WorkersBusy
    | QueueBusy
    | Behind
    | Expires
)


@dataclass(frozen=True, slots=True)
class Explanation:
    """Every reason why a task is not running at a moment, the most decisive first.

    `claimable`: a claim by a worker that handles all types and queues, and that asks for enough, would
    return it. Whether there is such a worker is said by `has_worker`: one that is alive and handles
    its type and its queue.
    """

    task_id: str
    status: TaskState
    at: datetime
    claimable: bool
    has_worker: bool
    reasons: tuple[Reason, ...]

    def __str__(self) -> str:
        return "\n".join([self.summary, *(str(reason) for reason in self.reasons)])

    @property
    def summary(self) -> str:
        """What is to be expected, in one sentence."""
        said = f"task {self.task_id} is {self.status}"
        if self.status not in (TaskState.PENDING, TaskState.SCHEDULED, TaskState.BLOCKED):
            return said
        if not self.claimable:
            return f"{said}, and cannot be claimed now"
        if not self.has_worker:
            return f"{said} and could be claimed, but no live worker handles it"
        return f"{said}, and is claimed as soon as it is its turn"


def _time(moment: datetime, *, milliseconds: bool = False) -> str:
    moment = moment.astimezone(UTC)
    fraction = f".{moment.microsecond // 1000:03}" if milliseconds else ""
    return f"{moment:%Y-%m-%d %H:%M:%S}{fraction} UTC"


def _number(counted: int, *, or_more: bool) -> str:
    return f"more than {counted}" if or_more else f"{counted}"


def _others(number: int, *, or_more: bool) -> str:
    said = _number(number, or_more=or_more)
    return "1 other comes" if said == "1" else f"{said} others come"


def _earliest(until: datetime, first: int, *, or_more: bool) -> str:
    """When there are tokens, after so many others."""
    said = f"not before {_time(until, milliseconds=True)}"
    if not first:
        return said
    later = ", and later:" if or_more else ","
    return f"{said}{later} {_number(first, or_more=or_more)} others first"


def _span(span: timedelta) -> str:
    seconds = span.total_seconds()
    for unit, size in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 1 else "a second"


def _listed(names: tuple[str, ...] | list[str]) -> str:
    return ", ".join(names)
