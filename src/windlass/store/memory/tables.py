"""What all verbs of the in-memory store work on."""

import functools
import threading
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any, Concatenate, ParamSpec, TypeVar
from uuid import UUID

from windlass.model.errors import TaskNotFound
from windlass.model.rule import LaneRule
from windlass.model.task import (
    RECOVERIES_BEFORE_ALONE,
    Fence,
    LaneKind,
    Leadership,
    NewTask,
    Retention,
    TaskRecord,
    TaskState,
    TypeDefaults,
)
from windlass.policy.limit import Bucket
from windlass.store.memory.gating import Gates, gates_of
from windlass.store.memory.state import (
    BreakerEntry,
    ClaimEntry,
    GateKey,
    LaneKey,
    Lineage,
    RuleKey,
    ScheduleEntry,
    TaskEntry,
    WindowEntry,
    WindowKey,
    WorkerEntry,
    called_back,
    task_record,
    tried_since,
)

DEAD = frozenset({TaskState.FAILED, TaskState.DEAD})


_P = ParamSpec("_P")
_R = TypeVar("_R")
_S = TypeVar("_S", bound="MemoryTables")
_Verb = Callable[Concatenate[_S, _P], Coroutine[Any, Any, _R]]


def transaction(verb: _Verb[_S, _P, _R]) -> _Verb[_S, _P, _R]:
    """Run a verb, which never suspends, under the lock; wake listeners after it."""

    @functools.wraps(verb)
    async def locked(store: _S, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with store._lock:  # noqa: SLF001 - this is the store's own lock
            answer = await verb(store, *args, **kwargs)
            store._call_entered()  # noqa: SLF001
            listeners = store._take_listeners()  # noqa: SLF001 - and its own method
            orders = store._take_orders()  # noqa: SLF001
            scheduled = store._take_schedule_listeners()  # noqa: SLF001
        for wake in (*listeners, *scheduled):
            wake()
        for tell, worker_id in orders:
            tell(worker_id)
        return answer

    return locked


def _utc_now() -> datetime:
    return datetime.now(UTC)


class MemoryTables:
    """Plain dictionaries and a lock, and the moves between them."""

    def __init__(
        self,
        *,
        retention: Retention = Retention(),  # noqa: B008 - a frozen value
        clock: Callable[[], datetime] = _utc_now,
    ) -> None:
        self._retention = retention
        self._clock = clock
        self._lock = threading.RLock()
        self._tasks: dict[UUID, TaskEntry] = {}
        self._ready: dict[
            LaneKey, dict[UUID, TaskEntry]
        ] = {}  # each lane in order of becoming ready
        self._scheduled: dict[UUID, TaskEntry] = {}
        self._gates = Gates(lambda task_id: self._tasks[task_id].status is TaskState.PENDING)
        self._entered: dict[GateKey, datetime] = {}  # in this transaction
        self._claims: dict[UUID, ClaimEntry] = {}
        self._keys: dict[tuple[str, str], UUID] = {}
        self._windows: dict[WindowKey, WindowEntry] = {}
        self._lineage: dict[UUID, Lineage] = {}  # of replays
        self._paused: dict[str, datetime] = {}
        self._paused_types: dict[str, datetime] = {}
        self._declared: dict[RuleKey, LaneRule] = {}
        self._set_by_operator: dict[RuleKey, LaneRule] = {}
        self._buckets: dict[RuleKey, Bucket] = {}
        self._types: dict[str, TypeDefaults] = {}
        self._registered: dict[str, datetime] = {}
        self._stopped: dict[str, tuple[datetime, str]] = {}  # types that are not retried, and why
        self._workers: dict[UUID, WorkerEntry] = {}
        self._breakers: dict[str, BreakerEntry] = {}
        self._schedules: dict[str, ScheduleEntry] = {}
        self._leader: Leadership | None = None
        self._term = 0
        self._term_ends_at = datetime.min.replace(tzinfo=UTC)
        self._fences = count(1)
        self._listeners: list[Callable[[], None]] = []
        self._has_news = False
        self._schedule_listeners: list[Callable[[], None]] = []
        self._has_new_schedules = False
        self._order_listeners: list[Callable[[UUID], None]] = []
        self._ordered: list[UUID] = []  # workers of whom something was just asked

    def _take_schedule_listeners(self) -> list[Callable[[], None]]:
        has_new, self._has_new_schedules = self._has_new_schedules, False
        return list(self._schedule_listeners) if has_new else []

    def _take_orders(self) -> list[tuple[Callable[[UUID], None], UUID]]:
        ordered, self._ordered = self._ordered, []
        return [(tell, worker_id) for worker_id in ordered for tell in self._order_listeners]

    def _schedule_in(self, without: Collection[str] = ()) -> float | None:
        now = self._clock()
        waits = [
            (entry.look_at(now) - now).total_seconds()
            for name, entry in self._schedules.items()
            if entry.is_active and name not in without
        ]
        return min(waits, default=None)

    def _take_listeners(self) -> list[Callable[[], None]]:
        has_news, self._has_news = self._has_news, False
        return list(self._listeners) if has_news else []

    def _place(self, task: TaskEntry, now: datetime) -> None:
        gate = self._put(task, now)
        if gate is not None:
            self._entered[gate] = now

    def _put(self, task: TaskEntry, now: datetime) -> GateKey | None:
        """Put a task where it has to wait, and return the gate if it is one."""
        gate = self._gates.next_for(task, now)
        if gate is not None:
            task.status = TaskState.BLOCKED
            self._gates.enter(gate, task)
        elif task.scheduled_for > now:
            task.status = TaskState.SCHEDULED
            self._scheduled[task.asked.id] = task
        else:
            task.status = TaskState.PENDING
            self._ready.setdefault(task.lane, {})[task.asked.id] = task
        self._has_news = True
        return gate

    def _answer_calls(self, now: datetime, limit: int | None = None) -> int:
        """Open the gates that were called; return how many calls that were."""
        calls = self._gates.take_calls(now, limit)
        self._gates.open([(call.key, call.leaving) for call in calls], self._put, now)
        return len(calls)

    def _call_entered(self) -> None:
        entered, self._entered = self._entered, {}
        for gate, now in entered.items():
            self._gates.call(gate, now)

    def _leave(self, task: TaskEntry, gates: Iterable[GateKey], now: datetime) -> None:
        """Have these gates looked at, for a task to leave them."""
        for key in gates:
            self._gates.call(key, now, task.asked.id)
            self._has_news = True

    def _leave_now(self, tasks: Iterable[TaskEntry], now: datetime) -> None:
        """Let tasks leave the gates that they have nothing to do with any more, and others through."""
        left: list[tuple[GateKey, UUID]] = []
        for task in tasks:
            if task.gates:
                self._gates.recall(task)
                left += [(key, task.asked.id) for key in self._gates.left_by(task)]
        self._gates.open(left, self._put, now)

    def _take_ready(self, task: TaskEntry) -> None:
        lane = self._ready[task.lane]
        del lane[task.asked.id]
        if not lane:
            del self._ready[task.lane]

    def _take_waiting(self, task: TaskEntry) -> bool:
        match task.status:
            case TaskState.PENDING:
                self._take_ready(task)
            case TaskState.BLOCKED:
                self._gates.step_out(task)
            case _:
                return self._scheduled.pop(task.asked.id, None) is not None
        return True

    def _still_waits(self, task_id: UUID) -> bool:
        """Whether a task waits for its time, and was never claimed."""
        task = self._scheduled.get(task_id)
        return task is not None and task.generation == 1

    def _give_back(self, task: TaskEntry, kind: LaneKind, now: datetime) -> None:
        task.generation += 1
        task.kind = LaneKind.ALONE if task.recoveries >= RECOVERIES_BEFORE_ALONE else kind
        task.worker_id = task.claimed_at = task.started_at = None
        self._place(task, now)

    def _end(
        self, task: TaskEntry, status: TaskState, last_error: str | None, now: datetime
    ) -> None:
        keep = task.asked.retention
        if keep is None:
            keep = self._retention.dead if status in DEAD else self._retention.ended
        if task.asked.idempotency_key is not None:
            keep = max(keep, self._retention.keys)
        task.status = status
        task.completed_at = now
        task.last_error = last_error
        task.cancel_reason = None
        task.drop_on = (now + keep).astimezone(UTC).date()
        self._leave(task, self._gates.left_by(task), now)
        self._call_back(task, now)

    def _call_back(self, task: TaskEntry, now: datetime) -> None:
        """Enqueue what follows the end of a task."""
        known = self._types.get(task.asked.type)
        if known is None or task.status is TaskState.CANCELLED:
            return
        succeeded = task.status is TaskState.COMPLETED
        callback = known.on_success if succeeded else known.on_failure
        if callback is not None:
            self._add(called_back(callback, task), now)

    def _add(self, task: NewTask, now: datetime) -> None:
        due = task.at or now + timedelta(seconds=task.delay)
        entry = TaskEntry(task, task.queue, task.priority, now, max(now, due), gates_of(task))
        if isinstance(task.expires, datetime):
            entry.expires_at = task.expires
        elif task.expires is not None:
            entry.expires_at = now + timedelta(seconds=task.expires)
        self._tasks[task.id] = entry
        self._place(entry, now)

    def _give_up(self, task: TaskEntry, why: str, now: datetime) -> None:
        """End a task that waits for another attempt as dead, and say why with its last error."""
        last = task.errors[-1] = task.errors[-1] | {"given_up": why}
        self._end(task, TaskState.DEAD, last["message"], now)

    def _why_not_again(
        self, task: TaskEntry, max_age: float | None, delay: float, now: datetime
    ) -> str | None:
        """Say why a failed attempt is the last one, if it is although others are left."""
        if task.asked.type in self._stopped:
            return f"retries of this type are stopped: {self._stopped[task.asked.type][1]}"
        if max_age is None or now <= tried_since(task, now) + timedelta(seconds=max_age - delay):
            return None
        return f"its next attempt would begin more than {max_age:g} s after it was enqueued"

    def _note_failure(self, task: TaskEntry, error: dict[str, Any], now: datetime) -> None:
        """Keep the error of the attempt that has just been counted."""
        noted = {
            "attempt": task.attempts,
            "generation": task.generation,
            "worker_id": task.worker_id and str(task.worker_id),
            "started_at": task.started_at and task.started_at.isoformat(),
            "ended_at": now.isoformat(),
        }
        task.errors.append(error | noted)

    def _held(self, fence: Fence) -> TaskEntry | None:
        """Return the task if its claim is there and the generation is the one that was claimed."""
        claim = self._claims.get(fence.token)
        if claim is None or claim.held.get(fence.task_id) != fence.generation:
            return None
        return self._tasks[fence.task_id]

    def _known(self, task_id: UUID) -> TaskEntry:
        if task_id not in self._tasks:
            raise TaskNotFound.of(task_id)
        return self._tasks[task_id]

    def _seen(self, task: TaskEntry) -> TaskState:
        """Return its state as people see it: what only waits for somebody to look is not blocked."""
        if task.status is TaskState.BLOCKED:
            return self._gates.status_of(task, self._clock())
        return task.status

    def _record(self, task: TaskEntry) -> TaskRecord:
        return task_record(task, self._lineage.get(task.asked.id), self._seen(task))

    def _forget(self, task_ids: Iterable[UUID]) -> None:
        """Remove the records of ended tasks, with all that is kept of them."""
        gone, now = set(task_ids), self._clock()
        for task in [self._tasks.pop(task_id) for task_id in gone]:
            self._leave(task, self._gates.held_by(task), now)  # the key that it keeps
        self._keys = {key: first for key, first in self._keys.items() if first not in gone}
        # A letter was replayed, also if what became of that is forgotten first.
        self._lineage = {
            task_id: lineage
            for task_id, lineage in self._lineage.items()
            if task_id in self._tasks or lineage.ancestor in self._tasks
        }

    def _lanes(
        self, types: Sequence[str], queues: Sequence[str] | None, other_than: Sequence[str] = ()
    ) -> Iterable[LaneKey]:
        for lane in self._ready:
            if lane.queue not in other_than and self._is_granted(lane, types, queues):
                yield lane

    def _is_granted(
        self, lane: LaneKey, types: Sequence[str], queues: Sequence[str] | None
    ) -> bool:
        is_asked_for = lane.type in types and (queues is None or lane.queue in queues)
        is_paused = lane.queue in self._paused or lane.type in self._paused_types
        return is_asked_for and not is_paused

    def _rule(self, key: RuleKey) -> LaneRule | None:
        """The rule that is in force for a queue or a type."""
        return self._set_by_operator.get(key) or self._declared.get(key)

    def _used(self, key: RuleKey) -> int:
        """How many tasks are held that count for a limit."""
        return sum(
            key in claim.limits.get(task_id, ())
            for claim in self._claims.values()
            for task_id in claim.held
        )
