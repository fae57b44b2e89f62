"""What the in-memory store remembers, and the records made of it."""

import json
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any, NamedTuple
from uuid import UUID, uuid4

from windlass.model.cancellation import cancelled_by
from windlass.model.limits import EXPIRED
from windlass.model.rule import RuleScope
from windlass.model.schedule import Schedule, SlotRecord, Stretch
from windlass.model.task import (
    ENDS,
    Callback,
    ClaimedTask,
    Fence,
    LaneKind,
    NewTask,
    TaskFilter,
    TaskRecord,
    TaskState,
    Window,
    WindowKind,
    WorkerInfo,
    WorkerRecord,
)

RuleKey = tuple[RuleScope, str]
WindowKey = tuple[str, WindowKind, object]  # type, and what has to be equal


class LaneKey(NamedTuple):
    """What a lane is."""

    queue: str
    type: str
    priority: int
    kind: LaneKind


class GateKey(NamedTuple):
    """What a gate is for: an ordering key, or a value of what the limit of a type is by."""

    type: str | None  # None: it is an ordering key
    value: str

    @property
    def is_order(self) -> bool:
        """Whether it is an ordering key, of all types."""
        return self.type is None


@dataclass(slots=True)
class TaskEntry:
    """One task, wherever it is."""

    asked: NewTask
    queue: str
    priority: int
    created_at: datetime
    scheduled_for: datetime  # while it is ready: since when
    gates: tuple[GateKey, ...] = ()  # to pass, in this order
    status: TaskState = TaskState.PENDING  # `BLOCKED` while it waits at a gate
    kind: LaneKind = LaneKind.NORMAL
    attempts: int = 0
    recoveries: int = 0
    generation: int = 1
    settled_by: Fence | None = None  # the last settlement: answers a repeated one
    cancel_reason: str | None = None  # asked of the worker that has it
    worker_id: UUID | None = None
    claimed_at: datetime | None = None
    started_at: datetime | None = None
    completed_at: datetime | None = None
    result: str | None = None
    last_error: str | None = None  # of an ended task
    errors: list[dict[str, Any]] = field(default_factory=list)
    drop_on: date = date.max
    is_reopened: bool = False  # by a person, after it had ended
    expires_at: datetime | None = None  # None once it is known to have begun
    put_off: str | None = None  # why it waits for its time, if it was

    def is_late(self, now: datetime) -> bool:
        """Whether it should have begun by now, and no attempt was made."""
        return self.expires_at is not None and self.expires_at <= now and not self.attempts

    @property
    def lane(self) -> LaneKey:
        """The lane it stands in when it is ready."""
        return LaneKey(self.queue, self.asked.type, self.priority, self.kind)


@dataclass(slots=True)
class ClaimEntry:
    """One lease and what it holds."""

    fence: int
    worker_id: UUID
    expires_at: datetime
    held: dict[UUID, int]  # task id → the generation that was claimed
    limits: dict[UUID, tuple[RuleKey, ...]] = field(default_factory=dict)  # what each counts for


class Lineage(NamedTuple):
    """Where a replay comes from."""

    ancestor: UUID
    generation: int  # of the ancestor
    depth: int
    replayed_at: datetime


class WindowEntry(NamedTuple):
    """The task that a window names; that of a debounce is over when it waits no longer."""

    task_id: UUID
    until: datetime


class WorkerEntry(NamedTuple):
    """A registered worker, and how long its sign of life counts."""

    record: WorkerRecord
    lease: timedelta


class BreakerEntry(NamedTuple):
    """A breaker that workers share, and whose trials decide."""

    epoch: int
    half_open_at: datetime | None = None  # None: it is closed
    opened_for: timedelta = timedelta(0)
    prober: UUID | None = None
    prober_until: datetime = datetime.min.replace(tzinfo=UTC)

    @property
    def is_closed(self) -> bool:
        """Whether everybody may call."""
        return self.half_open_at is None


def after(claimed_at: datetime | None, seconds: float | None) -> datetime | None:
    """The moment so many seconds after a claim."""
    if claimed_at is None or seconds is None:
        return None
    return claimed_at + timedelta(seconds=seconds)


def comparable(payload: str) -> object:
    """Turn JSON into a value that is equal as jsonb is: true is not 1, but 1 is 1.0."""

    def tagged(value: object) -> object:
        match value:
            case dict():
                return {key: tagged(each) for key, each in value.items()}
            case list():
                return [tagged(each) for each in value]
            case bool():
                return (value,)  # apart from numbers
            case _:
                return value

    return tagged(json.loads(payload, parse_float=Decimal))


def window_key(task: NewTask, window: Window) -> WindowKey:
    """What has to be equal for two calls to be of one window."""
    kind, _, key = window
    by_payload = kind is WindowKind.UNIQUE and key is None
    # As a text, which can be looked for; told apart from any key.
    return task.type, kind, (_canonical(comparable(task.payload)),) if by_payload else key


def _canonical(value: object) -> str:
    """The same text for values that are equal."""
    match value:
        case dict():
            members = (f"{key!r}: {_canonical(each)}" for key, each in sorted(value.items()))
            return "{" + ", ".join(members) + "}"
        case list():
            return "[" + ", ".join(map(_canonical, value)) + "]"
        case int() | Decimal():
            digits = f"{Decimal(value):f}" if value else "0"
            return digits.rstrip("0").rstrip(".") if "." in digits else digits
        case _:
            return repr(value)


def claimed_task(task: TaskEntry, now: datetime) -> ClaimedTask:
    """The task as its worker gets it."""
    return ClaimedTask(
        id=task.asked.id,
        type=task.asked.type,
        queue=task.queue,
        priority=task.priority,
        payload=task.asked.payload,
        attempts=task.attempts,
        max_attempts=task.asked.max_attempts,
        generation=task.generation,
        cancel_reason=task.cancel_reason or (EXPIRED if task.is_late(now) else None),
        waited=(task.claimed_at - task.scheduled_for).total_seconds() if task.claimed_at else 0.0,
    )


def task_record(
    task: TaskEntry, lineage: Lineage | None = None, status: TaskState | None = None
) -> TaskRecord:
    """The task as people see it, who may see another state."""
    last_failure = task.errors[-1] if task.errors else {}
    failed_at = datetime.fromisoformat(last_failure["ended_at"]) if last_failure else None
    has_ended = task.status in ENDS
    times = (task.created_at, task.claimed_at, task.started_at, failed_at)
    return TaskRecord(
        id=str(task.asked.id),
        type=task.asked.type,
        queue=task.queue,
        payload=json.loads(task.asked.payload),
        status=status or task.status,
        priority=task.priority,
        created_at=task.created_at,
        scheduled_for=task.scheduled_for,
        updated_at=task.completed_at or max(time for time in times if time is not None),
        attempts=task.attempts,
        max_attempts=task.asked.max_attempts,
        generation=task.generation,
        idempotency_key=task.asked.idempotency_key,
        worker_id=str(task.worker_id) if task.worker_id else None,
        claimed_at=task.claimed_at,
        started_at=task.started_at,
        completed_at=task.completed_at,
        last_error=task.last_error if has_ended else last_failure.get("message"),
        result=json.loads(task.result) if task.result else None,
        tags=task.asked.tags,
        errors=tuple(task.errors),
        replay_of=str(lineage.ancestor) if lineage else None,
        cancelled_by=cancelled_by(task.status, task.last_error),
    )


def called_back(callback: Callback, task: TaskEntry) -> NewTask:
    """The task that follows the end of another."""
    error = task.errors[-1] if task.errors else {}
    values = {
        "task_id": str(task.asked.id),
        "task_type": task.asked.type,
        "queue": task.queue,
        "attempts": task.attempts,
        "result": None if task.result is None else json.loads(task.result),
        "error": {key: value for key, value in error.items() if key not in _OF_AN_ATTEMPT},
    }
    payload = json.loads(callback.task.payload) | {name: values[name] for name in callback.takes}
    return callback.task._replace(id=uuid4(), payload=json.dumps(payload))


_OF_AN_ATTEMPT = ("traceback", "attempt", "generation", "worker_id", "started_at", "ended_at")


def tried_since(task: TaskEntry, now: datetime) -> datetime:
    """From when on the age of a task counts for its retries."""
    if not task.is_reopened:
        return task.created_at
    if not task.attempts:
        return now
    first = [error for error in task.errors if error["attempt"] == 1][-1]
    return datetime.fromisoformat(first["started_at"] or first["ended_at"])


def failed_with(task: TaskEntry) -> str | None:
    """The class of the error that a task ended with, if it failed."""
    if task.status not in (TaskState.FAILED, TaskState.DEAD):
        return None
    error_class: str | None = task.errors[-1].get("class")
    return error_class


def matches(task: TaskEntry, status: TaskState, wanted: TaskFilter) -> bool:
    """Whether a task that people see in a state is among those to list."""
    return (
        (not wanted.statuses or status in wanted.statuses)
        and wanted.type in (None, task.asked.type)
        and wanted.queue in (None, task.queue)
        and (wanted.tag is None or wanted.tag in task.asked.tags)
        and (wanted.created_from is None or task.created_at >= wanted.created_from)
        and (wanted.created_until is None or task.created_at < wanted.created_until)
    )


def worker_record(worker: WorkerInfo, now: datetime) -> WorkerRecord:
    """A worker as people see it."""
    return WorkerRecord(
        id=str(worker.id),
        host=worker.host,
        pid=worker.pid,
        version=worker.version,
        capacity=worker.capacity,
        types=worker.types,
        queues=worker.queues,
        started_at=now,
        heartbeat_at=now,
        running=0,
        idle=False,
        leader=False,
    )


@dataclass(slots=True)
class ScheduleEntry:
    """A schedule, and what became of its slots."""

    schedule: Schedule
    owner: str
    registered_at: datetime
    decided_until: datetime
    settled: tuple[Stretch, ...] = ()
    next_at: datetime | None = None  # None: not known yet, or never
    is_planned: bool = False  # whether `next_at` is known
    revision: int = 1
    paused_at: datetime | None = None
    resumed_at: datetime | None = None
    retired_at: datetime | None = None
    slots: dict[tuple[datetime, bool], SlotRecord] = field(default_factory=dict)  # and on request

    @property
    def is_paused(self) -> bool:
        """Whether no slot is fired."""
        return self.paused_at is not None and self.resumed_at is None

    @property
    def is_active(self) -> bool:
        """Whether slots are decided on."""
        return self.retired_at is None and not self.is_paused

    def look_at(self, now: datetime) -> datetime:
        """When it wants a decision."""
        if not self.is_planned or self.decided_until > now:
            return now
        return self.next_at or datetime.max.replace(tzinfo=UTC)

    def renew(self, now: datetime) -> None:
        """Begin anew with the slots from now on."""
        self.decided_until = now
        self.is_planned, self.next_at = False, None
        if self.resumed_at is not None:
            self.paused_at = self.resumed_at = None
        elif self.paused_at is not None:
            self.paused_at = now
