"""Waiting for results."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any
from uuid import UUID

from windlass.model.errors import ConfigurationError, StoreUnavailable, TaskNotFound
from windlass.model.task import Ended
from windlass.service import LONGEST_PATIENCE, answered_within
from windlass.store.port import ReadStore

Waiting = Callable[[asyncio.Future[Ended]], AbstractContextManager[Any]]

FIRST_LOOK = 0.02  # seconds until the first look for a result; the pause grows from there
LONGEST_LOOK = 0.25


class ResultWaiter:
    """One look for all the results that are waited for, at a pause that grows.

    A newcomer is looked for at once, by itself: its task may have ended long ago.
    """

    def __init__(self, store: ReadStore) -> None:
        self._store = store
        self._waiting: dict[UUID, list[asyncio.Future[Ended]]] = {}
        self._task: asyncio.Task[None] | None = None
        self._pause = FIRST_LOOK
        self._new: set[UUID] = set()
        self._came = asyncio.Event()

    async def look_once(self, task_id: UUID) -> Ended | None:
        """Return the end of a task that has ended."""
        ended, unknown = await self._store.ended([task_id])
        if unknown:
            raise TaskNotFound.of(task_id)
        return ended[0] if ended else None

    async def wait(self, task_id: UUID, waiting: Waiting = nullcontext) -> Ended:
        """Wait for the end of a task, inside of what is made of the future that will hold it."""
        future: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(task_id, []).append(future)
        self._pause = FIRST_LOOK
        self._new.add(task_id)
        self._came.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._look(), name="windlass-results")
        try:
            with waiting(future):
                return await future
        finally:
            futures = self._waiting.get(task_id, [])
            if future in futures:
                futures.remove(future)
            if not futures:
                self._waiting.pop(task_id, None)

    async def close(self) -> None:
        """Stop looking; whoever still waits is told so."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._fail(ConfigurationError("the app was closed while a result was waited for"))

    async def _look(self) -> None:
        clock = asyncio.get_running_loop().time
        due = clock()
        while self._waiting:
            everything = clock() >= due
            asked = list(self._waiting if everything else self._new)
            self._new.clear()
            self._came.clear()
            try:
                # One look is for all: a connection that is silent must not keep it.
                async with answered_within(LONGEST_PATIENCE):
                    ended, unknown = await self._store.ended(asked)
            except StoreUnavailable:
                ended, unknown = [], []  # looking again does no harm; who waits says for how long
            except Exception as error:  # noqa: BLE001 - nobody else would tell those who wait
                self._fail(error)
                return
            for one in ended:
                self._resolve(one.id, one)
            for task_id in unknown:
                self._resolve(task_id, TaskNotFound.of(task_id))
            if everything:
                due = clock() + self._pause
                self._pause = min(self._pause * 1.5, LONGEST_LOOK)
            else:
                due = min(due, clock() + self._pause)  # newcomers began with a short one again
            with suppress(TimeoutError):
                async with asyncio.timeout_at(due):
                    await self._came.wait()

    def _resolve(self, task_id: UUID, answer: Ended | Exception) -> None:
        for future in self._waiting.pop(task_id, []):
            if future.done():
                continue
            if isinstance(answer, Ended):
                future.set_result(answer)
            else:
                future.set_exception(answer)

    def _fail(self, error: Exception) -> None:
        for task_id in list(self._waiting):
            self._resolve(task_id, error)
