"""What clients and workers write down of a run: lines of JSON that outlive a killed process."""

import itertools
import json
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from uuid import UUID

from windlass.app import App
from windlass.client import Handle
from windlass.context import Context
from windlass.model.errors import StoreUnavailable, WindlassError
from windlass.store.port import OperateStore
from windlass.testing.history_check.reading import INTENT


class _Lines:
    """A file to which several processes add whole lines."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def add(self, said: str, **values: Any) -> None:
        # One write: the kernel adds it as a whole, and keeps it when the process is killed.
        line = json.dumps({"said": said, "at": time.time(), **values})
        os.write(self._file, line.encode() + b"\n")

    def close(self) -> None:
        os.close(self._file)


class ClientLog:
    """Enqueues for a client, and writes down what it asked for and what it was told."""

    def __init__(self, path: Path) -> None:
        self._lines = _Lines(path)
        self._name = f"{INTENT}{os.getpid()}-{time.time_ns()}"
        self._numbers = itertools.count(1)

    def invoke(self, type_name: str, key: str | None = None) -> str:
        """Note that an enqueue is about to be asked for; the task has to carry the answer as a tag."""
        intent = f"{self._name}-{next(self._numbers)}"
        self._lines.add("invoke", intent=intent, type=type_name, key=key)
        return intent

    def ok(self, intent: str, task_id: UUID | str) -> None:
        """Note that the caller was told so."""
        self._lines.add("ok", intent=intent, task=str(task_id))

    async def enqueue(
        self, app: App, name: str, payload: dict[str, Any] | None = None, **options: Any
    ) -> Handle:
        """Enqueue by name; what is raised goes on to the caller."""
        intent = self.invoke(name, options.get("idempotency_key"))
        tags = [*options.pop("tags", ()), intent]
        try:
            handle = await app.enqueue(name, payload, tags=tags, **options)
        except BaseException as error:
            is_refused = isinstance(error, WindlassError) and not isinstance(
                error, StoreUnavailable
            )
            said = "fail" if is_refused else "unknown"
            self._lines.add(said, intent=intent, error=type(error).__name__)
            raise
        self.ok(intent, handle.id)
        return handle

    async def pause(self, store: OperateStore, queue: str) -> None:
        """Pause a queue: what is claimed from here on must not be of it."""
        await store.pause(queue)
        self._lines.add("paused", queue=queue)

    async def resume(self, store: OperateStore, queue: str) -> None:
        """Resume a queue."""
        self._lines.add("resume", queue=queue)
        await store.resume(queue)

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


def log_runs(path: Path) -> Callable[[Context, Callable[[], Awaitable[Any]]], Awaitable[Any]]:
    """Make a middleware that writes down each call of a handler: `app.middleware(log_runs(path))`."""
    lines = _Lines(path)

    async def log_run(ctx: Context, call_next: Callable[[], Awaitable[Any]]) -> Any:
        what: dict[str, Any] = {
            "task": ctx.task_id,
            "attempt": ctx.attempt,
            "fence": ctx.fence,
            "worker": str(ctx.worker_id),
            "pid": os.getpid(),
        }
        lines.add("started", **what)
        outcome = "ok"
        try:
            return await call_next()
        except BaseException as error:
            outcome = type(error).__name__
            raise
        finally:
            lines.add("ended", **what, outcome=outcome)

    return log_run
