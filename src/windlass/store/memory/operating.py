"""Operate in memory: cancel, change, retry, pause."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import assert_never
from uuid import UUID

from windlass.model.errors import WrongState
from windlass.model.task import ENDS, Buried, CancelAnswer, Change, LaneKind, TaskState, WorkerOrder
from windlass.store.memory.state import TaskEntry
from windlass.store.memory.tables import MemoryTables, transaction


class OperateVerbs(MemoryTables):
    """What people do to tasks and queues."""

    @transaction
    async def cancel(self, task_id: UUID, reason: str) -> CancelAnswer:
        return self._cancel(self._known(task_id), reason)

    @transaction
    async def cancel_many(self, task_ids: Sequence[UUID], reason: str) -> list[CancelAnswer]:
        known = {one: self._tasks[one] for one in task_ids if one in self._tasks}
        answers = {task_id: self._cancel(task, reason) for task_id, task in known.items()}
        return [answers.get(task_id, CancelAnswer.ABSENT) for task_id in task_ids]

    def _cancel(self, task: TaskEntry, reason: str) -> CancelAnswer:
        if task.status in ENDS:
            return CancelAnswer.ENDED
        if self._take_waiting(task):
            task.settled_by = None
            self._end(task, TaskState.CANCELLED, reason, self._clock())
            return CancelAnswer.CANCELLED
        if task.cancel_reason is None:
            task.cancel_reason = reason
        return CancelAnswer.REQUESTED

    @transaction
    async def change(self, task_id: UUID, change: Change) -> None:
        task = self._known(task_id)
        is_in_line = task.status is TaskState.BLOCKED
        if not is_in_line and not self._take_waiting(task):
            raise WrongState(f"task {task_id} is {task.status}: only a waiting one can be changed")
        now = self._clock()
        task.put_off = None
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
        if is_in_line and self._gates.next_for(task, now) is not None:
            return  # where it is
        if is_in_line:
            self._take_waiting(task)
        self._place(task, now)
        self._leave_now([task], now)

    @transaction
    async def retry(self, task_id: UUID) -> None:
        task = self._known(task_id)
        if task.status not in ENDS - {TaskState.COMPLETED}:
            raise WrongState(
                f"task {task_id} is {task.status}: only a failed, dead or cancelled one can be retried",
            )
        now = self._clock()
        task.is_reopened = True
        task.expires_at = None
        task.attempts = task.recoveries = 0
        task.scheduled_for = now
        task.settled_by = task.completed_at = task.result = None
        self._gates.recall(task)
        self._give_back(task, LaneKind.NORMAL, now)

    @transaction
    async def stop_retries(self, type: str, reason: str) -> None:  # noqa: A002
        self._stopped[type] = (self._clock(), reason)

    @transaction
    async def bury_scheduled(self, type: str, limit: int, *, after: str | None = None) -> Buried:  # noqa: A002, ARG002 - what it has passed over is gone
        return self._bury((task for _, task in sorted(self._scheduled.items())), type, limit)

    @transaction
    async def bury_ready(self, type: str, limit: int, *, after: str | None = None) -> Buried:  # noqa: A002, ARG002 - as above
        return self._bury(
            (task for lane in self._ready.values() for task in lane.values()), type, limit
        )

    def _bury(self, waiting: Iterable[TaskEntry], kind: str, limit: int) -> Buried:
        if kind not in self._stopped:
            return Buried()
        again = [task for task in waiting if task.asked.type == kind and task.attempts]
        now, (_, reason) = self._clock(), self._stopped[kind]
        for task in again[:limit]:
            self._take_waiting(task)
            task.settled_by = None
            self._give_up(task, f"retries of this type are stopped: {reason}", now)
        return Buried(len(again[:limit]), "the rest" if again[limit:] else None)

    @transaction
    async def allow_retries(self, type: str) -> bool:  # noqa: A002
        return self._stopped.pop(type, None) is not None

    @transaction
    async def pause(self, queue: str) -> None:
        self._paused.setdefault(queue, self._clock())

    @transaction
    async def resume(self, queue: str) -> bool:
        self._has_news = True
        return self._paused.pop(queue, None) is not None

    @transaction
    async def order_workers(
        self, worker_ids: Sequence[UUID], order: WorkerOrder
    ) -> frozenset[UUID]:
        now = self._clock()
        known = frozenset(one for one in worker_ids if one in self._workers)
        for worker_id in known:
            worker = self._workers[worker_id]
            record = worker.record
            match order:
                case WorkerOrder.PAUSE:
                    record = replace(record, paused_at=record.paused_at or now)
                case WorkerOrder.RESUME:
                    record = replace(record, paused_at=None)
                case WorkerOrder.DRAIN:
                    record = replace(record, drained_at=record.drained_at or now)
                case _:
                    assert_never(order)
            self._workers[worker_id] = worker._replace(record=record)
        self._ordered += known
        return known
