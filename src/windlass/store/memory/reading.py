"""Read from memory."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from uuid import UUID

from windlass.model.errors import ConfigurationError
from windlass.model.limits import shown
from windlass.model.task import (
    ENDS,
    Ended,
    QueueRecord,
    TaskFilter,
    TaskPage,
    TaskRecord,
    TaskState,
    TypeDefaults,
    TypeRecord,
    WorkerRecord,
)
from windlass.store.memory.state import failed_with, matches
from windlass.store.memory.tables import MemoryTables, transaction


class ReadVerbs(MemoryTables):
    """Tasks, queues and workers as records."""

    @transaction
    async def get(self, task_id: UUID) -> TaskRecord:
        return self._record(self._known(task_id))

    @transaction
    async def ended(self, task_ids: Sequence[UUID]) -> tuple[list[Ended], list[UUID]]:
        known = {each: self._tasks[each] for each in task_ids if each in self._tasks}
        ended = [
            Ended(task_id, task.status, task.result, task.last_error, failed_with(task))
            for task_id, task in known.items()
            if task.status in ENDS
        ]
        return ended, [each for each in task_ids if each not in known]

    @transaction
    async def tasks(self, wanted: TaskFilter) -> TaskPage:
        before = None if wanted.after is None else _position(wanted.after)
        found = sorted(
            task_id
            for task_id, task in self._tasks.items()
            if (before is None or task_id < before) and matches(task, self._seen(task), wanted)
        )
        page = found[: -wanted.limit - 1 : -1]
        rest = page[-1].hex if len(page) < len(found) else None
        return TaskPage([self._record(self._tasks[each]) for each in page], rest)

    @transaction
    async def queues(self) -> list[QueueRecord]:
        counts: dict[str, Counter[TaskState]] = {name: Counter() for name in self._paused}
        oldest: dict[str, datetime] = {}
        for task in self._tasks.values():
            status = self._seen(task)
            if status not in ENDS:
                counts.setdefault(task.queue, Counter())[status] += 1
            if status is TaskState.PENDING:
                since = oldest.get(task.queue, task.scheduled_for)
                oldest[task.queue] = min(since, task.scheduled_for)
        return [
            QueueRecord(name, name in self._paused, dict(counts[name]), oldest.get(name))
            for name in sorted(counts)
        ]

    @transaction
    async def types(self) -> list[TypeRecord]:
        names = {*self._types, *self._stopped, *self._paused_types}
        return [self._type_record(name) for name in sorted(names)]

    def _type_record(self, name: str) -> TypeRecord:
        known = self._types.get(name) or TypeDefaults(name)
        stopped_at, reason = self._stopped.get(name, (None, None))
        paused_at = self._paused_types.get(name)
        registered_at = self._registered.get(name, stopped_at or paused_at or self._clock())
        return TypeRecord(
            name,
            known.queue,
            known.priority,
            known.max_attempts,
            registered_at,
            stopped_at,
            reason,
            paused_at,
        )

    @transaction
    async def workers(self) -> list[WorkerRecord]:
        is_led = self._term_ends_at > self._clock()
        leader = self._leader.holder if self._leader and is_led else None
        return [
            replace(worker.record, leader=worker_id == leader)
            for worker_id, worker in self._workers.items()
        ]

    @transaction
    async def has_work(self, types: Sequence[str], queues: Sequence[str] | None) -> bool:
        claimed = (self._tasks[each] for claim in self._claims.values() for each in claim.held)
        return (
            any(self._lanes(types, queues))
            or any(
                task.asked.type in types and (queues is None or task.queue in queues)
                for task in claimed
            )
            or any(
                self._is_granted(task.lane, types, queues)
                for task in self._gates.looked_at(self._clock())
            )
        )


def _position(text: str) -> UUID:
    try:
        return UUID(text)
    except ValueError:
        raise ConfigurationError(
            f"position {shown(text)} is of no listing; give what a page said, as it is"
        ) from None
