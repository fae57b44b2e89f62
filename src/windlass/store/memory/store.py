"""The store inside this process: the executable specification that every other adapter follows."""

import functools
import json
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import count, islice
from typing import Any, Concatenate, ParamSpec, TypeVar
from uuid import UUID, uuid4

from windlass.model.errors import (
    IdempotencyConflict,
    LeaseLost,
    NotLeader,
    TaskNotFound,
    WrongState,
)
from windlass.model.task import (
    ALONE_IS_AN_OUTAGE_ABOVE,
    ENDS,
    RECOVERIES_BEFORE_ALONE,
    Answer,
    CancelAnswer,
    Change,
    Claim,
    ClaimAnswer,
    ClaimRequest,
    Ended,
    Enqueued,
    Fence,
    LaneKind,
    Leadership,
    NewTask,
    Outcome,
    Pulse,
    PulseAnswer,
    QueueRecord,
    Rescued,
    Retained,
    Retention,
    Settlement,
    Started,
    TaskFilter,
    TaskRecord,
    TaskState,
    TypeDefaults,
    WorkerInfo,
    WorkerRecord,
)
from windlass.store.memory.state import (
    ClaimEntry,
    LaneKey,
    TaskEntry,
    WorkerEntry,
    after,
    claimed_task,
    comparable,
    matches,
    task_record,
    worker_record,
)

_COMES_BACK = frozenset({Outcome.RETRIED, Outcome.SNOOZED, Outcome.RELEASED})
_USES_AN_ATTEMPT = frozenset({Outcome.COMPLETED, Outcome.FAILED, Outcome.DEAD, Outcome.RETRIED})
_DEAD = frozenset({TaskState.FAILED, TaskState.DEAD})


_P = ParamSpec("_P")
_R = TypeVar("_R")
_Verb = Callable[Concatenate["MemoryStore", _P], Coroutine[Any, Any, _R]]


def _transaction(verb: _Verb[_P, _R]) -> _Verb[_P, _R]:
    """Run a verb, which never suspends, under the lock; wake listeners after it."""

    @functools.wraps(verb)
    async def locked(store: "MemoryStore", /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with store._lock:  # noqa: SLF001 - this is the store's own lock
            answer = await verb(store, *args, **kwargs)
            listeners = store._take_listeners()  # noqa: SLF001
        for wake in listeners:
            wake()
        return answer

    return locked


def _utc_now() -> datetime:
    return datetime.now(UTC)


class MemoryStore:
    """All verbs on plain dictionaries; may be used from several threads and event loops."""

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
        self._claims: dict[UUID, ClaimEntry] = {}
        self._keys: dict[tuple[str, str], UUID] = {}
        self._paused: set[str] = set()
        self._types: dict[str, TypeDefaults] = {}
        self._workers: dict[UUID, WorkerEntry] = {}
        self._leader: Leadership | None = None
        self._term = 0
        self._term_ends_at = datetime.min.replace(tzinfo=UTC)
        self._fences = count(1)
        self._listeners: list[Callable[[], None]] = []
        self._has_news = False

    async def open(self) -> None:
        """Do nothing: there is nothing to connect to."""

    async def close(self) -> None:
        """Keep everything: closing and opening again loses no task."""

    def beside(self) -> "MemoryStore":
        """Return itself: the lock makes it safe for every thread."""
        return self

    def listen(self, wake: Callable[[], None]) -> AbstractAsyncContextManager[None]:
        """Call `wake`, from any thread, whenever there may be work."""
        return self._listening(wake)

    @asynccontextmanager
    async def _listening(self, wake: Callable[[], None]) -> AsyncIterator[None]:
        with self._lock:
            self._listeners.append(wake)
        try:
            yield
        finally:
            with self._lock:
                self._listeners.remove(wake)

    def _take_listeners(self) -> list[Callable[[], None]]:
        has_news, self._has_news = self._has_news, False
        return list(self._listeners) if has_news else []

    @_transaction
    async def enqueue(
        self,
        tasks: Sequence[NewTask],
        *,
        fence: Fence | None = None,
        repeated: bool = False,
    ) -> list[Enqueued]:
        if fence is not None and self._held(fence) is None:
            raise LeaseLost(f"task {fence.task_id}: the lease is lost")
        # Decide on all before adding any: a conflict in the last must leave no trace.
        new: dict[UUID, NewTask] = {}
        keys: dict[tuple[str, str], UUID] = {}
        answers = []
        for index, task in enumerate(tasks):
            first = task.id
            known = repeated and task.id in self._tasks
            if not known and task.idempotency_key is not None:
                key = (task.type, task.idempotency_key)
                first = keys.setdefault(key, self._keys.get(key, task.id))
                self._check_same_payload(index, task, first, new)
            if not known and first == task.id:
                new[task.id] = task
            answers.append(Enqueued(first, created=first == task.id))
        self._keys.update(keys)
        now = self._clock()
        for task in new.values():
            due = task.at or now + timedelta(seconds=task.delay)
            entry = TaskEntry(task, task.queue, task.priority, now, max(now, due))
            self._tasks[task.id] = entry
            self._place(entry, now)
        return answers

    def _check_same_payload(
        self, index: int, task: NewTask, first: UUID, new: dict[UUID, NewTask]
    ) -> None:
        if first == task.id:
            return
        before = new[first] if first in new else self._tasks[first].asked
        if comparable(before.payload) != comparable(task.payload):
            conflict = IdempotencyConflict(
                f"task type {task.type!r}, idempotency key {task.idempotency_key!r}: "
                f"task {first} was enqueued with another payload; "
                "use another key for another payload",
            )
            conflict.index = index
            raise conflict

    @_transaction
    async def type_defaults(self, name: str) -> TypeDefaults | None:
        return self._types.get(name)

    @_transaction
    async def register_types(self, types: Sequence[TypeDefaults]) -> None:
        self._types.update((each.name, each) for each in types)

    def _place(self, task: TaskEntry, now: datetime) -> None:
        if task.scheduled_for > now:
            task.status = TaskState.SCHEDULED
            self._scheduled[task.asked.id] = task
        else:
            task.status = TaskState.PENDING
            self._ready.setdefault(task.lane, {})[task.asked.id] = task
        self._has_news = True

    def _take_ready(self, task: TaskEntry) -> None:
        lane = self._ready[task.lane]
        del lane[task.asked.id]
        if not lane:
            del self._ready[task.lane]

    def _take_waiting(self, task: TaskEntry) -> bool:
        if task.status is TaskState.PENDING:
            self._take_ready(task)
        return task.status is TaskState.PENDING or bool(self._scheduled.pop(task.asked.id, None))

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
            keep = self._retention.dead if status in _DEAD else self._retention.ended
        if task.asked.idempotency_key is not None:
            keep = max(keep, self._retention.keys)
        task.status = status
        task.completed_at = now
        task.last_error = last_error
        task.cancel_reason = None
        task.drop_on = (now + keep).astimezone(UTC).date()

    def _note_failure(self, task: TaskEntry, error: dict[str, Any], now: datetime) -> None:
        """Keep the error of the attempt that has just been counted."""
        noted = {
            "attempt": task.attempts,
            "generation": task.generation,
            "worker_id": str(task.worker_id),
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

    @_transaction
    async def claim(self, request: ClaimRequest) -> ClaimAnswer:

        def rank(lane: LaneKey) -> tuple[Any, ...]:
            head = next(iter(self._ready[lane].values()))
            aged = head.scheduled_for - lane.priority * request.ageing
            return aged, -lane.priority, lane.queue, lane.type, -lane.kind

        now = self._clock()
        lanes = sorted(self._lanes(request.types, request.queues), key=rank)
        suspects = [lane for lane in lanes if lane.kind is LaneKind.ALONE]
        limit = self._alone_limit(suspects, request.limit) if request.alone else request.limit
        chosen: list[TaskEntry] = []
        for lane in lanes:
            if (lane.kind is LaneKind.ALONE) is request.alone:
                chosen.extend(islice(self._ready[lane].values(), limit - len(chosen)))
        return ClaimAnswer(
            claim=self._grant(chosen, request, now) if chosen else None,
            alone_waiting=bool(suspects) and not request.alone,
            due_in=self._due_in(now),
        )

    def _due_in(self, now: datetime) -> float | None:
        waits = [(task.scheduled_for - now).total_seconds() for task in self._scheduled.values()]
        return min((wait for wait in waits if wait > -2), default=None)

    def _lanes(self, types: Sequence[str], queues: Sequence[str] | None) -> Iterable[LaneKey]:
        for lane in self._ready:
            is_asked_for = lane.type in types and (queues is None or lane.queue in queues)
            if is_asked_for and lane.queue not in self._paused:
                yield lane

    def _alone_limit(self, suspects: list[LaneKey], limit: int) -> int:
        waiting = sum(
            len(tasks) for lane, tasks in self._ready.items() if lane.kind is LaneKind.ALONE
        )
        if not suspects or waiting <= ALONE_IS_AN_OUTAGE_ABOVE:
            return 1
        first = next(iter(self._ready[suspects[0]].values()))
        return max(1, limit >> (first.recoveries - 1))

    def _grant(self, tasks: list[TaskEntry], request: ClaimRequest, now: datetime) -> Claim:
        token = uuid4()
        fence = next(self._fences)
        for task in tasks:
            self._take_ready(task)
            task.status = TaskState.CLAIMED
            task.worker_id = request.worker_id
            task.claimed_at = now
        held = {task.asked.id: task.generation for task in tasks}
        self._claims[token] = ClaimEntry(fence, now + request.lease, held)
        return Claim(token, fence, tuple(map(claimed_task, tasks)), request.alone)

    @_transaction
    async def start(self, started: Sequence[Started]) -> frozenset[UUID]:
        lost = set()
        for token, task_id, generation, started_after in started:
            task = self._held(Fence(token, task_id, generation))
            if task is None:
                lost.add(task_id)
            else:
                task.status = TaskState.RUNNING
                task.started_at = after(task.claimed_at, started_after)
        return frozenset(lost)

    @_transaction
    async def requested_cancellations(self, task_ids: Sequence[UUID]) -> dict[UUID, str]:
        tasks = {each: self._tasks[each] for each in task_ids if each in self._tasks}
        return {
            task_id: task.cancel_reason
            for task_id, task in tasks.items()
            if task.cancel_reason is not None
        }

    @_transaction
    async def settle(self, settlements: Sequence[Settlement]) -> list[Answer]:
        now = self._clock()
        # By id: what comes back in one call does so oldest first.
        order = sorted(range(len(settlements)), key=lambda place: settlements[place].task_id)
        answers = {place: self._settle(settlements[place], now) for place in order}
        return [answers[place] for place in range(len(settlements))]

    def _settle(self, settlement: Settlement, now: datetime) -> Answer:
        fence = Fence(settlement.token, settlement.task_id, settlement.generation)
        task = self._held(fence)
        if task is None:
            known = self._tasks.get(settlement.task_id)
            return Answer.ALREADY if known and known.settled_by == fence else Answer.LOST
        self._let_go(fence)
        task.settled_by = fence
        task.started_at = after(task.claimed_at, settlement.started_after)
        outcome = settlement.outcome
        error = json.loads(settlement.error) if settlement.error else {}
        if outcome in _COMES_BACK and task.cancel_reason is not None:
            outcome, error = Outcome.CANCELLED, {"message": task.cancel_reason}
        task.attempts += outcome in _USES_AN_ATTEMPT
        if outcome in _USES_AN_ATTEMPT - {Outcome.COMPLETED}:
            self._note_failure(task, error, now)
        if outcome not in _COMES_BACK:
            status = TaskState(outcome)
            task.result = None if status in _DEAD else settlement.result
            self._end(task, status, error.get("message"), now)
            return Answer.APPLIED
        if outcome is Outcome.RETRIED:
            task.recoveries = 0
        if outcome is not Outcome.RELEASED:
            task.scheduled_for = now + timedelta(seconds=settlement.delay)
        released = outcome is Outcome.RELEASED
        self._give_back(task, LaneKind.RETURNED if released else LaneKind.NORMAL, now)
        return Answer.APPLIED

    def _let_go(self, fence: Fence) -> None:
        claim = self._claims[fence.token]
        del claim.held[fence.task_id]
        if not claim.held:
            del self._claims[fence.token]

    @_transaction
    async def register(self, worker: WorkerInfo, *, lease: timedelta) -> None:
        now = self._clock()
        known = self._workers.get(worker.id)
        record = replace(known.record, heartbeat_at=now) if known else worker_record(worker, now)
        self._workers[worker.id] = WorkerEntry(record, lease)

    @_transaction
    async def pulse(self, pulse: Pulse) -> PulseAnswer:
        now = self._clock()
        claims = {token: self._claims[token] for token in pulse.tokens if token in self._claims}
        kept = frozenset(token for token, claim in claims.items() if claim.expires_at > now)
        for token in kept:
            claims[token].expires_at = now + pulse.lease
        known = self._workers.get(pulse.worker_id)
        if known is not None:
            record = replace(known.record, heartbeat_at=now, running=pulse.running, idle=pulse.idle)
            self._workers[pulse.worker_id] = WorkerEntry(record, pulse.lease)
        return PulseAnswer(kept, registered=known is not None)

    @_transaction
    async def set_idle(self, worker_id: UUID, idle: bool) -> None:
        known = self._workers.get(worker_id)
        if known is not None:
            self._workers[worker_id] = known._replace(record=replace(known.record, idle=idle))

    @_transaction
    async def deregister(self, worker_id: UUID) -> None:
        self._workers.pop(worker_id, None)

    @_transaction
    async def cancel(self, task_id: UUID, reason: str) -> CancelAnswer:
        task = self._known(task_id)
        if task.status in ENDS:
            return CancelAnswer.ENDED
        if self._take_waiting(task):
            task.settled_by = None
            self._end(task, TaskState.CANCELLED, reason, self._clock())
            return CancelAnswer.CANCELLED
        if task.cancel_reason is None:
            task.cancel_reason = reason
        return CancelAnswer.REQUESTED

    @_transaction
    async def change(self, task_id: UUID, change: Change) -> None:
        task = self._known(task_id)
        if not self._take_waiting(task):
            raise WrongState(f"task {task_id} is {task.status}: only a waiting one can be changed")
        now = self._clock()
        if change.priority is not None:
            task.priority = change.priority
        if change.queue is not None:
            task.queue = change.queue
        if change.at is not None:
            task.scheduled_for = max(now, change.at)
        elif change.delay is not None:
            task.scheduled_for = now + timedelta(seconds=change.delay)
        if task.kind is LaneKind.RETURNED:
            task.kind = LaneKind.NORMAL
        self._place(task, now)

    @_transaction
    async def retry(self, task_id: UUID) -> None:
        task = self._known(task_id)
        if task.status not in ENDS - {TaskState.COMPLETED}:
            raise WrongState(
                f"task {task_id} is {task.status}: only a failed, dead or cancelled one can be retried",
            )
        now = self._clock()
        task.attempts = task.recoveries = 0
        task.scheduled_for = now
        task.settled_by = task.completed_at = task.result = None
        self._give_back(task, LaneKind.NORMAL, now)

    @_transaction
    async def pause(self, queue: str) -> None:
        self._paused.add(queue)

    @_transaction
    async def resume(self, queue: str) -> None:
        self._paused.discard(queue)
        self._has_news = True

    def _known(self, task_id: UUID) -> TaskEntry:
        if task_id not in self._tasks:
            raise TaskNotFound(f"task {task_id} never existed, or its retention is over")
        return self._tasks[task_id]

    @_transaction
    async def get(self, task_id: UUID) -> TaskRecord:
        return task_record(self._known(task_id))

    @_transaction
    async def ended(self, task_ids: Sequence[UUID]) -> tuple[list[Ended], list[UUID]]:
        known = {each: self._tasks[each] for each in task_ids if each in self._tasks}
        ended = [
            Ended(task_id, task.status, task.result, task.last_error)
            for task_id, task in known.items()
            if task.status in ENDS
        ]
        return ended, [each for each in task_ids if each not in known]

    @_transaction
    async def tasks(self, wanted: TaskFilter) -> list[TaskRecord]:
        newest_first = sorted(self._tasks.items(), reverse=True)
        found = (task_record(task) for _, task in newest_first if matches(task, wanted))
        return list(islice(found, wanted.limit))

    @_transaction
    async def queues(self) -> list[QueueRecord]:
        counts: dict[str, Counter[TaskState]] = {name: Counter() for name in self._paused}
        oldest: dict[str, datetime] = {}
        for task in self._tasks.values():
            if task.status not in ENDS:
                counts.setdefault(task.queue, Counter())[task.status] += 1
            if task.status is TaskState.PENDING:
                since = oldest.get(task.queue, task.scheduled_for)
                oldest[task.queue] = min(since, task.scheduled_for)
        return [
            QueueRecord(name, name in self._paused, dict(counts[name]), oldest.get(name))
            for name in sorted(counts)
        ]

    @_transaction
    async def workers(self) -> list[WorkerRecord]:
        is_led = self._term_ends_at > self._clock()
        leader = self._leader.holder if self._leader and is_led else None
        return [
            replace(worker.record, leader=worker_id == leader)
            for worker_id, worker in self._workers.items()
        ]

    @_transaction
    async def has_work(self, types: Sequence[str], queues: Sequence[str] | None) -> bool:
        claimed = (self._tasks[each] for claim in self._claims.values() for each in claim.held)
        return any(self._lanes(types, queues)) or any(
            task.asked.type in types and (queues is None or task.queue in queues)
            for task in claimed
        )

    @_transaction
    async def lead(
        self,
        candidate: UUID,
        *,
        current: Leadership | None,
        term: timedelta,
    ) -> Leadership | None:
        now = self._clock()
        if self._leader is None or self._term_ends_at <= now:
            self._term += 1
            self._leader = Leadership(candidate, self._term)
        elif self._leader != current or current.holder != candidate:
            return None
        self._term_ends_at = now + term
        return self._leader

    @_transaction
    async def resign(self, leadership: Leadership) -> None:
        if self._leader == leadership:
            self._leader = None

    def _assert_leader(self, leadership: Leadership) -> None:
        if self._leader != leadership or self._term_ends_at <= self._clock():
            raise NotLeader(f"term {leadership.term} is over")

    @_transaction
    async def promote(
        self,
        limit: int,
        *,
        leadership: Leadership | None = None,
        just_due: bool = False,  # noqa: ARG002 - only a hint
    ) -> int:
        if leadership is not None:
            self._assert_leader(leadership)
        now = self._clock()
        due = sorted(
            (task.scheduled_for, task_id)
            for task_id, task in self._scheduled.items()
            if task.scheduled_for <= now
        )[:limit]
        for _, task_id in due:
            self._place(self._scheduled.pop(task_id), now)
        return len(due)

    @_transaction
    async def rescue(self, limit: int, *, leadership: Leadership | None = None) -> Rescued:
        if leadership is not None:
            self._assert_leader(leadership)
        now = self._clock()
        expired = sorted(
            (claim.expires_at, claim.fence, token)
            for token, claim in self._claims.items()
            if claim.expires_at <= now
        )[:limit]
        fates: Counter[str] = Counter()
        for _, _, token in expired:
            for task_id in self._claims.pop(token).held:
                fates[self._rescue(self._tasks[task_id], now)] += 1
        return Rescued(
            claims=len(expired),
            returned=fates["returned"] + fates["lost"],
            lost_attempts=fates["lost"] + fates["dead"],
            dead=fates["dead"],
            cancelled=fates["cancelled"],
        )

    def _rescue(self, task: TaskEntry, now: datetime) -> str:
        task.settled_by = None
        if task.cancel_reason is not None:
            self._end(task, TaskState.CANCELLED, task.cancel_reason, now)
            return "cancelled"
        if task.status is TaskState.CLAIMED:
            task.recoveries += 1
            self._give_back(task, LaneKind.RETURNED, now)
            return "returned"
        message = f"worker {task.worker_id} was lost"
        task.attempts += 1
        self._note_failure(task, {"type": "WorkerLost", "message": message}, now)
        if task.attempts >= task.asked.max_attempts:
            self._end(task, TaskState.DEAD, message, now)
            return "dead"
        self._give_back(task, LaneKind.RETURNED, now)
        return "lost"

    @_transaction
    async def remove_dead_workers(self, *, leadership: Leadership) -> list[UUID]:
        self._assert_leader(leadership)
        now = self._clock()
        silent = [
            worker_id
            for worker_id, worker in self._workers.items()
            if worker.record.heartbeat_at + 3 * worker.lease <= now
        ]
        for worker_id in silent:
            del self._workers[worker_id]
        return silent

    @_transaction
    async def tidy(self, *, leadership: Leadership) -> int:
        self._assert_leader(leadership)
        return 0

    @_transaction
    async def prepare_history(self, *, leadership: Leadership) -> int:
        self._assert_leader(leadership)
        return 0

    @_transaction
    async def retain(self, *, leadership: Leadership) -> Retained:
        self._assert_leader(leadership)
        today = self._clock().astimezone(UTC).date()
        over = {
            task_id: task
            for task_id, task in self._tasks.items()
            if task.status in ENDS and task.drop_on < today
        }
        for task_id in over:
            del self._tasks[task_id]
        self._keys = {key: first for key, first in self._keys.items() if first not in over}
        dead = [task for task in over.values() if task.status in _DEAD]
        days = {task.drop_on for task in over.values() if task.status not in _DEAD}
        return Retained(partitions=len(days), dead=len(dead))
