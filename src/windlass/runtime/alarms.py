"""Tells the application of tasks that failed for good, after the fact: it can neither undo nor delay it."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol
from uuid import UUID

from windlass.model.errors import StoreUnavailable, TaskNotFound
from windlass.model.task import TaskRecord
from windlass.runtime.hooks import call
from windlass.service import LONGEST_PATIENCE, answered_within
from windlass.telemetry import emit

MOST_WAITING = 1000  # tasks; of those above it nobody is told
CALLED_WITHIN = 30.0  # seconds for one hook


class DeadReader(Protocol):
    """What is told of a task."""

    async def get(self, task_id: UUID) -> TaskRecord:
        """Return the whole task or raise `TaskNotFound`."""


class Alarms:
    """Calls the hooks of an application with each task that has failed for good, one after the other."""

    def __init__(self, store: DeadReader, hooks: Sequence[Callable[[TaskRecord], Any]]) -> None:
        self._store = store
        self._hooks = hooks
        self._waiting: asyncio.Queue[UUID] = asyncio.Queue(MOST_WAITING)

    def tell(self, task_ids: Iterable[UUID]) -> None:
        """Have the hooks called, later."""
        if not self._hooks:
            return
        for task_id in task_ids:
            try:
                self._waiting.put_nowait(task_id)
            except asyncio.QueueFull:
                emit("alarm.skipped", task_id=task_id)

    async def run(self) -> None:
        """Call hooks until cancelled."""
        while True:
            task_id = await self._waiting.get()
            try:
                await self._tell(task_id)
            finally:
                self._waiting.task_done()

    async def finish(self) -> None:
        """Wait until all are told that are known by now."""
        await self._waiting.join()

    async def _tell(self, task_id: UUID) -> None:
        try:
            async with answered_within(LONGEST_PATIENCE):
                record = await self._store.get(task_id)
        except (StoreUnavailable, TaskNotFound) as error:
            emit("alarm.failed", task_id=task_id, error=error)
            return
        for hook in self._hooks:
            try:
                async with asyncio.timeout(CALLED_WITHIN):
                    await call(hook, record)
            except Exception as error:  # noqa: BLE001 - it is the application's
                emit("alarm.failed", task_id=task_id, error=error)
