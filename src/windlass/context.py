"""What a handler is told about the task it runs."""

import logging
from collections.abc import MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Never

from windlass.model.errors import ConfigurationError
from windlass.model.task import Fence

# The fence of the handler that is running here, with the registry it belongs to: enqueues of the
# same application carry it.
current_fence: ContextVar[tuple[object, Fence] | None] = ContextVar("windlass_fence", default=None)


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

    def transaction(self) -> Never:
        """Not built yet."""
        raise ConfigurationError("ctx.transaction() is not built yet")

    def complete(self, *_: Any, **__: Any) -> Never:
        """Not built yet."""
        raise ConfigurationError("ctx.complete() is not built yet")

    def complete_sync(self, *_: Any, **__: Any) -> Never:
        """Not built yet."""
        raise ConfigurationError("ctx.complete_sync() is not built yet")
