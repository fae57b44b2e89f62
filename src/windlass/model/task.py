"""Tasks as they pass along the street: asked for, claimed, ended, looked at."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import IntEnum, StrEnum
from typing import Any, NamedTuple
from uuid import UUID

import msgspec

from windlass.model.failure import ErrorClass


class TaskState(StrEnum):
    """Where a task stands; the values are what users and the database see."""

    SCHEDULED = "scheduled"
    BLOCKED = "blocked"
    PENDING = "pending"
    CLAIMED = "claimed"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    DEAD = "dead"
    CANCELLED = "cancelled"


ENDS = frozenset(
    {TaskState.COMPLETED, TaskState.FAILED, TaskState.DEAD, TaskState.CANCELLED},
)


class LaneKind(IntEnum):
    """Why a task is ready: decides how its lane is claimed."""

    NORMAL = 0
    RETURNED = 1  # released or rescued: keeps its first ready time, so it is next and not last
    ALONE = 2  # recovered twice: may be what kills workers, so it is claimed by itself


RECOVERIES_BEFORE_ALONE = 2
ALONE_IS_AN_OUTAGE_ABOVE = 100  # so many suspects at once are no poison but a lost machine


class WindowKind(StrEnum):
    """What a call does that finds a task of a call before it; the values are what users see."""

    UNIQUE = "unique_for"  # it is answered with that one, if their payloads or keys are equal
    THROTTLE = "throttle"  # it is answered with that one, whatever their payloads
    DEBOUNCE = "debounce"  # it gives that one its payload and another time, while that one waits


class Window(NamedTuple):
    """For how long a call is taken for a repetition of one before it, and by what."""

    kind: WindowKind
    seconds: float
    key: str | None = None  # None: by the payload if it is to be unique, else by the type alone


class NewTask(NamedTuple):
    """A task as a caller asks for it; `delay` and `at` exclude each other."""

    id: UUID
    type: str
    payload: str  # a JSON object
    queue: str = "default"
    priority: int = 10
    max_attempts: int = 4
    delay: float = 0.0  # seconds
    at: datetime | None = None
    idempotency_key: str | None = None
    tags: tuple[str, ...] = ()
    retention: timedelta | None = None  # None: the setting at the time it ends
    expires: datetime | float | None = None  # not begun by then, or in so many seconds: cancelled
    ordering_key: str | None = None  # of tasks that have it one runs at a time, in their order
    keeps_key: bool = False  # also when it has failed, until it is reopened, replayed or discarded
    limit_by: str | None = None  # JSON: [name, default] of each argument that its limit is by
    window: Window | None = (
        None  # not with an idempotency key; a debounce not with a time or an ordering key
    )


FILLED_IN = ("task_id", "task_type", "queue", "attempts", "result", "error")


class Callback(NamedTuple):
    """A task that is enqueued when another has ended, in the transaction that ends that one."""

    task: NewTask  # a template: its id is not used, and its payload lacks what is filled in
    takes: tuple[str, ...] = ()  # which of `FILLED_IN`


class Enqueued(msgspec.Struct, frozen=True, gc=False):
    """The answer to one enqueued task: its id, and whether this call created it."""

    id: UUID
    created: bool


class Fence(NamedTuple):
    """What a worker shows with every write on behalf of a task it was granted."""

    token: UUID
    task_id: UUID
    generation: int


# What is made for each task that runs is a struct: it costs half of what a tuple with names does, to make
# and to read. The collector need not look at those that hold nothing but values.


class ClaimedTask(msgspec.Struct, frozen=True, gc=False):
    """A task granted to a worker."""

    id: UUID
    type: str
    queue: str
    priority: int
    payload: str  # see `forget_payload`
    attempts: int  # ended ones: the one now beginning is attempts + 1
    max_attempts: int
    generation: int  # fences every write: an older one is refused
    cancel_reason: str | None  # set when a cancellation was asked for before this claim
    waited: float = 0.0  # seconds since it became ready

    def forget_payload(self) -> None:
        """Let go of what was read: it may be large, and the claim is kept until its last task has ended."""
        msgspec.structs.force_setattr(self, "payload", "")


@dataclass(frozen=True, slots=True, eq=False)
class Claim:
    """A batch of tasks under one lease."""

    token: UUID
    fence: int  # grows with every claim; for systems outside that want to refuse late writes
    tasks: tuple[ClaimedTask, ...]
    alone: bool = False
    kind: tuple[str, str] | None = None  # type and queue, if all its tasks are of one


@dataclass(frozen=True, slots=True)
class ClaimRequest:
    """Who asks for tasks, for which types and queues, and how many."""

    worker_id: UUID
    types: tuple[str, ...]
    limit: int
    lease: timedelta
    ageing: timedelta  # how long a task waits to gain one point of priority
    queues: tuple[str, ...] | None = None  # None: all
    alone: bool = False
    # What alone is to be looked at, as a wake-up named it.
    lane: int | None = None
    task_id: UUID | None = None
    apart: bool = False  # the worker claims these types by themselves, beside its others
    is_part: bool = False  # it serves more queues than these, and claims from others beside this
    at_most: int | None = None  # can begin at once; see `ClaimStore.claim`
    other_than: tuple[str, ...] = ()  # queues that are left out, although all are asked for


class ClaimAnswer(NamedTuple):
    """What a claim found: the grant, and what else the fetcher should know."""

    claim: Claim | None
    alone_waiting: bool = False  # suspects wait: ask again with `alone`
    due_in: float | None = None  # seconds until a scheduled task is due, from 2 s ago on
    more_in: float | None = None  # seconds until a limit lets more through by itself
    is_capped: bool = False  # more would have been granted but for `at_most`


class Outcome(StrEnum):
    """What a settlement does to a task."""

    COMPLETED = "completed"
    FAILED = "failed"
    DEAD = "dead"
    CANCELLED = "cancelled"
    RETRIED = "retried"  # comes back after `delay`, an attempt is used
    SNOOZED = "snoozed"  # comes back after `delay`, no attempt is used
    RELEASED = "released"  # comes back at once, next in line, no attempt is used


class Settlement(msgspec.Struct, frozen=True, gc=False):
    """How one attempt ends, ready to be written."""

    token: UUID
    task_id: UUID
    generation: int
    outcome: Outcome
    started_after: float | None = None  # seconds from claim to start; None if it never started
    result: str | None = None  # JSON
    delay: float = 0.0  # seconds
    error: str | None = (
        None  # a JSON object: class, type, message, traceback; or why it was put off
    )
    reported: bool = False  # it was reported as running
    error_class: ErrorClass | None = None  # of the error, for those who count
    max_age: float | None = None  # seconds: a retry that would begin later ends the task as dead
    calls_back: bool = False  # something may be enqueued when the task has ended


@dataclass(slots=True, kw_only=True)
class Completion:
    """How a handler ends its own task, together with what else it writes."""

    fence: Fence
    calls_back: bool = False  # something may be enqueued with it
    started_after: float | None  # seconds from claim to start
    result: str | None = None  # JSON
    is_asked: bool = False  # from here on it may be committed, whatever is heard of it


class Answer(StrEnum):
    """What the store did with a settlement."""

    APPLIED = "applied"
    GIVEN_UP = "given up"  # applied, but the task is dead instead of being tried again
    ALREADY = "already applied"
    LOST = "lost"


class Started(NamedTuple):
    """A task reported as running."""

    token: UUID
    task_id: UUID
    generation: int
    started_after: float


class CancelAnswer(StrEnum):
    """What came of a request to cancel."""

    CANCELLED = "cancelled"
    REQUESTED = "requested"  # its worker was asked
    ENDED = "ended"
    HELD = "held"  # by somebody else's transaction: nothing was done
    ABSENT = "absent"  # nobody knows it


@dataclass(frozen=True, slots=True)
class Change:
    """What may be changed of a task that still waits; None leaves it as it is."""

    priority: int | None = None
    queue: str | None = None
    at: datetime | None = None
    delay: float | None = None


@dataclass(frozen=True, slots=True)
class TaskRecord:
    """One task as people see it, live or ended."""

    id: str
    type: str
    queue: str
    payload: Any
    status: TaskState
    priority: int
    created_at: datetime
    scheduled_for: datetime
    updated_at: datetime
    attempts: int
    max_attempts: int
    generation: int
    idempotency_key: str | None = None
    worker_id: str | None = None
    claimed_at: datetime | None = None
    started_at: datetime | None = None
    completed_at: datetime | None = None
    last_error: str | None = None
    result: Any = None
    tags: tuple[str, ...] = ()
    errors: tuple[dict[str, Any], ...] = ()  # one entry per failed attempt, oldest first
    replay_of: str | None = None  # the dead letter that it was made of
    cancelled_by: str | None = None  # who asked for its cancellation, if anybody said

    @property
    def error_class(self) -> str | None:
        """The class of the last error, if an attempt has failed."""
        return self.errors[-1].get("class") if self.errors else None


class Ended(NamedTuple):
    """The end of a task, as whoever waits for its result needs it."""

    id: UUID
    status: TaskState
    result: str | None  # JSON
    last_error: str | None
    error_class: str | None = None  # of the last error, if it failed


@dataclass(frozen=True, slots=True)
class TaskFilter:
    """Which tasks to list; `after` is the `rest` of the page before."""

    statuses: tuple[TaskState, ...] = ()
    type: str | None = None
    queue: str | None = None
    tag: str | None = None
    created_from: datetime | None = None
    created_until: datetime | None = None
    after: str | None = None
    limit: int = 50


@dataclass(frozen=True, slots=True)
class TaskPage:
    """A part of a listing, newest id first.

    A store looks at so many tasks for a page and no more: there may be fewer records than were
    asked for, or none, although others fit.
    """

    records: list[TaskRecord]
    rest: str | None = None  # where the next page goes on, for the store alone; None: that was all
    looked_back_to: datetime | None = None  # until when, if it stopped looking before it had enough


@dataclass(frozen=True, slots=True)
class QueueRecord:
    """A queue as people see it."""

    name: str
    paused: bool
    counts: dict[TaskState, int]  # live tasks only
    oldest_ready_at: datetime | None


@dataclass(frozen=True, slots=True)
class TypeDefaults:
    """What a registered type contributes to a task enqueued by name alone, or whose worker is lost."""

    name: str
    queue: str = "default"
    priority: int = 10
    max_attempts: int = 4
    retention: timedelta | None = None
    on_success: Callback | None = None
    on_failure: Callback | None = None
    max_age: float | None = None  # seconds: after a lost worker no attempt begins later
    limit_by: str | None = None  # see `NewTask`

    @property
    def calls_back(self) -> bool:
        """Whether anything is enqueued when a task of it has ended."""
        return self.on_success is not None or self.on_failure is not None


@dataclass(frozen=True, slots=True)
class TypeRecord:
    """A registered type as people see it."""

    name: str
    queue: str
    priority: int
    max_attempts: int
    registered_at: datetime
    retries_stopped_at: datetime | None = None
    retries_stopped_because: str | None = None
    paused_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What a worker says of itself when it registers."""

    id: UUID
    host: str
    pid: int
    version: str
    capacity: int
    types: tuple[str, ...]
    queues: tuple[str, ...] | None
    defaults: tuple[TypeDefaults, ...] = ()  # of its types, as it registered them


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """A registered worker as people see it."""

    id: str
    host: str
    pid: int
    version: str
    capacity: int
    types: tuple[str, ...]
    queues: tuple[str, ...] | None
    started_at: datetime
    heartbeat_at: datetime
    running: int
    idle: bool
    leader: bool
    breakers: dict[str, str] = field(default_factory=dict)  # name → state, at its last sign of life
    paused_at: datetime | None = None  # since when it is to claim nothing
    drained_at: datetime | None = None  # since when it is to finish and end, or does so by itself
    full_queues: tuple[str, ...] = ()  # of which it took nothing, at its last sign of life


class WorkerOrder(StrEnum):
    """What people ask of a worker."""

    PAUSE = "pause"  # claim nothing, and finish what it has
    RESUME = "resume"  # go on, unless it drains
    DRAIN = "drain"  # claim nothing, finish, and end


class Pulse(NamedTuple):
    """A worker's sign of life and the claims it wants to keep."""

    worker_id: UUID
    tokens: Sequence[UUID]
    lease: timedelta
    running: int
    idle: bool
    patience: timedelta = timedelta(0)  # how long to wait for claims that somebody holds
    # By the worker's own clock none of these leases is over: if by the store's one is, that jumped.
    trusted: bool = False
    breakers: Mapping[str, str] | None = None  # name → state
    full_queues: Sequence[str] = ()  # of which it takes nothing for now
    drains: bool = False  # it claims nothing any more, told to or by itself


class PulseAnswer(NamedTuple):
    """Which claims were kept, which were held by somebody just then, whether the worker is known.

    A claim that is neither kept nor skipped is lost.
    """

    kept: frozenset[UUID]
    registered: bool
    skipped: frozenset[UUID] = frozenset()
    # What is asked of it by now, and what queues weigh; None: nobody could say.
    order: WorkerOrder | None = WorkerOrder.RESUME
    weights: Mapping[str, int] | None = None


class Leadership(NamedTuple):
    """A term of office: only writes that show it are carried out."""

    holder: UUID
    term: int


class Due(NamedTuple):
    """What there may be for a leader to do, by the store's clock. What is false is certain."""

    now: datetime
    claims: bool = True  # any are held: they may be over
    scheduled: bool = True  # tasks wait for their time
    silent_workers: bool = True  # a lease has passed without a sign of life
    leftovers: bool = True  # cancellations, reports or lanes that may want tidying
    expiring: bool = True  # tasks may be late for their start
    schedule_in: float | None = 0.0  # seconds until a schedule wants a decision; None: none does
    gates: bool = True  # some have been called


@dataclass(frozen=True, slots=True)
class Rescued:
    """What a rescue did: counts, for the log and the metrics."""

    claims: int = 0
    returned: int = 0
    lost_attempts: int = 0
    dead: int = 0
    cancelled: int = 0
    died: tuple[UUID, ...] = ()  # those that are dead by it


class Buried(NamedTuple):
    """A part of the tasks that were ready for another attempt, and will have none."""

    number: int = 0
    rest: str | None = None  # where the next part goes on, for the store alone; None: that was all


class Expired(NamedTuple):
    """What became of tasks that came too late."""

    cancelled: int = 0
    has_more: bool = False  # to cancel or to forget


@dataclass(frozen=True, slots=True)
class Retained:
    """What retention removed."""

    partitions: int = 0
    dead: int = 0
    waiting: tuple[str, ...] = field(default=())  # partitions that a reader still holds


@dataclass(frozen=True, slots=True)
class Retention:
    """How long ended tasks are kept, and how long an idempotency key is remembered after the end."""

    ended: timedelta = timedelta(days=7)
    dead: timedelta = timedelta(days=30)
    keys: timedelta = timedelta(days=7)
