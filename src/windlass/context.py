"""What a handler is told about the task it runs."""

import logging
from asyncio import Future
from collections.abc import Coroutine, MutableMapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Never, Protocol, overload
from uuid import UUID

from windlass.model.errors import ConfigurationError
from windlass.model.task import Fence


class Fenced(Protocol):
    """What is running."""

    @property
    def fence(self) -> Fence:
        """What every write on behalf of its task shows."""

    def overran(self, since: float) -> bool:
        """Whether its time limit has passed, and by the monotonic clock not before `since`."""

    def awaiting(
        self, task_id: UUID, answer: Future[Any], *, is_bounded: bool
    ) -> AbstractContextManager[None]:
        """Wait for the result of another task while the block lasts."""


# What is running here, with the registry it belongs to: enqueues of the same application carry its fence.
current_job: ContextVar[tuple[object, Fenced] | None] = ContextVar("windlass_job", default=None)


class Ending(Protocol):
    """How a handler ends its own task."""

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        """Open a transaction that completes the task when it is left."""

    def set_result(self, value: Any) -> None:
        """Keep the result that is written when the transaction is left."""

    def complete(self, value: Any, connection: Any) -> Coroutine[Any, Any, None]:
        """Complete the task in the transaction of a connection of the handler, once awaited."""

    def complete_sync(self, value: Any, connection: Any) -> None:
        """`complete` for a handler that runs in a thread."""


class _TaskLog(logging.LoggerAdapter[logging.Logger]):
    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        extra = self.extra or {}
        kwargs["extra"] = {**extra, **kwargs.get("extra", {})}
        return f"[{extra['task_type']} {extra['task_id']}] {msg}", kwargs


@dataclass(slots=True, kw_only=True)
class Context:
    """The task that is running, for its handler and for middleware."""

    task_id: str
    type: str
    attempt: int  # from 1
    max_attempts: int
    queue: str
    worker_id: str
    fence: int  # grows with every claim: lets systems outside refuse a late write
    deadline: datetime | None  # when the attempt times out, by this machine's clock
    state: Any  # what the start-up hook returned
    _own_end: "Ending | None" = None
    _cancelled: bool = field(default=False, init=False)

    @property
    def cancelled(self) -> bool:
        """Whether the handler should stop: cancelled, timed out, lease lost or shutting down."""
        return self._cancelled

    def cancel(self) -> None:
        """Say so to a handler that looks."""
        self._cancelled = True

    @property
    def log(self) -> logging.LoggerAdapter[logging.Logger]:
        """A logger that names the task."""
        return _TaskLog(
            logging.getLogger("windlass.task"),
            {"task_type": self.type, "task_id": self.task_id, "attempt": self.attempt},
        )

    def progress(self, *_: Any, **__: Any) -> Never:
        """Not built yet."""
        raise ConfigurationError("ctx.progress() is not built yet")

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        """Open a transaction: what is done on its connection commits with this task's success.

        At most once per attempt. `LeaseLost` if the lease is gone, when it is entered or left.
        """
        return self._ending().transaction()

    @overload
    def complete(self, value: Any) -> None: ...
    @overload
    def complete(self, value: Any, *, connection: Any) -> Coroutine[Any, Any, None]: ...
    def complete(self, value: Any, *, connection: Any = None) -> Coroutine[Any, Any, None] | None:
        """Set the result that `transaction()` writes; or complete in a transaction of your own.

        The latter is to be awaited. `TypeError` at once if the connection is synchronous.
        """
        if connection is None:
            self._ending().set_result(value)
            return None
        return self._ending().complete(value, connection)

    def complete_sync(self, value: Any, *, connection: Any) -> None:
        """Complete in a transaction of your own, from a handler that runs in a thread."""
        self._ending().complete_sync(value, connection)

    def _ending(self) -> "Ending":
        if self._own_end is None:
            raise ConfigurationError("this context belongs to no worker, so it ends no task")
        return self._own_end
