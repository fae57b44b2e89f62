"""Enqueue in memory."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, Never
from uuid import UUID

from windlass.model.errors import ConfigurationError, IdempotencyConflict, LeaseLost
from windlass.model.task import Enqueued, Fence, NewTask, TypeDefaults, Window, WindowKind
from windlass.store.memory.gating import gates_of
from windlass.store.memory.state import TaskEntry, WindowEntry, WindowKey, comparable, window_key
from windlass.store.memory.tables import MemoryTables, transaction
from windlass.store.port import Guest


class _Windows:
    """What a call has to do with windows, before any of it is done."""

    def __init__(self) -> None:
        self.named: dict[WindowKey, UUID] = {}
        self.opened: dict[WindowKey, WindowEntry] = {}
        self.left_alone: set[WindowKey] = set()  # as this call was carried out before
        self.last: dict[UUID, NewTask] = {}  # whose payload and time a debounced task is to have


def _as_last(task: NewTask, last: NewTask) -> NewTask:
    """A task as the last call of its debounce wants it; of others that is the task itself."""
    window = last.window
    if window is None or window.kind is not WindowKind.DEBOUNCE:
        return task
    return task._replace(payload=last.payload, delay=window.seconds)


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
        now = self._clock()
        windows = _Windows()
        answers = []
        for index, task in enumerate(tasks):
            first = task.id
            known = repeated and task.id in self._tasks
            if task.window is not None:
                first = self._named(task, task.window, windows, now, is_known=known)
            if not known and task.idempotency_key is not None:
                key = (task.type, task.idempotency_key)
                first = keys.setdefault(key, self._keys.get(key, task.id))
                self._check_same_payload(index, task, first, new)
            if not known and first == task.id:
                new[task.id] = task
            answers.append(Enqueued(first, created=first == task.id))
        self._keys.update(keys)
        self._windows.update(windows.opened)
        for task in new.values():
            self._add(_as_last(task, windows.last.pop(task.id, task)), now)
        for task_id, last in windows.last.items():
            self._replace(self._tasks[task_id], last, now)
        return answers

    def _named(
        self, task: NewTask, window: Window, windows: "_Windows", now: datetime, *, is_known: bool
    ) -> UUID:
        """Return the task that the window of a call names: one of before, or this one."""
        key = window_key(task, window)
        if key not in windows.named:
            windows.named[key] = task.id
            if is_known:
                windows.left_alone.add(key)
                return task.id
            entry, until = self._windows.get(key), now + timedelta(seconds=window.seconds)
            if window.kind is WindowKind.DEBOUNCE:
                if entry is not None and self._still_waits(entry.task_id):
                    windows.named[key] = entry.task_id
                windows.opened[key] = WindowEntry(windows.named[key], until)
            elif entry is not None and entry.until > now:
                windows.named[key] = entry.task_id
            else:
                windows.opened[key] = WindowEntry(task.id, until)
        named = windows.named[key]
        if window.kind is WindowKind.DEBOUNCE and key not in windows.left_alone:
            windows.last[named] = task
        return named

    def _replace(self, task: TaskEntry, last: NewTask, now: datetime) -> None:
        """Give a task that waits the payload of another call, and its time."""
        del self._scheduled[task.asked.id]
        task.asked = _as_last(task.asked, last)
        task.gates = gates_of(task.asked)
        task.scheduled_for = now + timedelta(seconds=task.asked.delay)
        self._place(task, now)

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
