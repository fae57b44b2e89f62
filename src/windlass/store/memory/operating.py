"""Operate in memory: cancel, change, retry, pause."""

from datetime import timedelta
from uuid import UUID

from windlass.model.errors import WrongState
from windlass.model.task import ENDS, CancelAnswer, Change, LaneKind, TaskState
from windlass.store.memory.tables import MemoryTables, transaction


class OperateVerbs(MemoryTables):
    """What people do to tasks and queues."""

    @transaction
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

    @transaction
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
        self._give_back(task, LaneKind.NORMAL, now)

    @transaction
    async def stop_retries(self, type: str, reason: str) -> None:  # noqa: A002
        self._stopped[type] = (self._clock(), reason)

    @transaction
    async def bury_retries(self, type: str, limit: int) -> int:  # noqa: A002
        if type not in self._stopped:
            return 0
        now = self._clock()
        waiting = [
            task
            for _, task in sorted(self._scheduled.items())
            if task.asked.type == type and task.attempts
        ]
        for task in waiting[:limit]:
            self._take_waiting(task)
            reason = self._stopped[type][1]
            task.errors[-1]["given_up"] = f"retries of this type are stopped: {reason}"
            task.settled_by = None
            self._end(task, TaskState.DEAD, task.errors[-1]["message"], now)
        return len(waiting[:limit])

    @transaction
    async def allow_retries(self, type: str) -> bool:  # noqa: A002
        return self._stopped.pop(type, None) is not None

    @transaction
    async def pause(self, queue: str) -> None:
        self._paused.add(queue)

    @transaction
    async def resume(self, queue: str) -> bool:
        was_paused = queue in self._paused
        self._paused.discard(queue)
        self._has_news = True
        return was_paused
