"""Enqueue in memory."""

from collections.abc import Sequence
from typing import Any, Never
from uuid import UUID

from windlass.model.errors import ConfigurationError, IdempotencyConflict, LeaseLost
from windlass.model.task import Enqueued, Fence, NewTask, TypeDefaults
from windlass.store.memory.state import comparable
from windlass.store.memory.tables import MemoryTables, transaction
from windlass.store.port import Guest


class EnqueueVerbs(MemoryTables):
    """New tasks, and the defaults of their types."""

    def guest(self, connection: Any, *, is_async: bool) -> Never:  # noqa: ARG002 - takes none
        kind = type(connection).__qualname__
        raise ConfigurationError(
            f"option 'connection' was given a {kind}, and a store in memory takes part in no "
            "transaction; leave it out, or use PostgreSQL"
        )

    async def enqueue_within(
        self, guest: Guest, tasks: Sequence[NewTask], *, fence: Fence | None = None
    ) -> Never:
        raise AssertionError(f"a guest in memory: {guest}, {tasks}, {fence}")

    @transaction
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
            self._add(task, now)
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

    @transaction
    async def type_defaults(self, name: str) -> TypeDefaults | None:
        return self._types.get(name)

    @transaction
    async def register_types(self, types: Sequence[TypeDefaults]) -> None:
        now = self._clock()
        for each in types:
            if self._types.get(each.name) != each:
                self._types[each.name] = each
                self._registered[each.name] = now
