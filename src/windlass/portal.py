"""An event loop in a thread of its own, for callers that have none."""

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from windlass.model.errors import WindlassError

T = TypeVar("T")


class CalledInEventLoop(WindlassError, RuntimeError):  # noqa: N818 - says what happened
    """A `_sync` method was called where its async twin belongs."""


class Portal:
    """Runs coroutines for synchronous callers; starts its thread when first used.

    After a fork the child has no thread: it starts its own.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = 0

    def call(self, name: str, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine and return its result; `name` is the async method to use instead."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            pass
        else:
            raise CalledInEventLoop(
                f"{name}_sync() would block the running event loop; use: await {name}()"
            )
        return asyncio.run_coroutine_threadsafe(call(), self._started()).result()

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None or self._pid != os.getpid():
                loop = asyncio.new_event_loop()
                thread = threading.Thread(
                    target=loop.run_forever, name="windlass-portal", daemon=True
                )
                thread.start()
                self._loop, self._pid = loop, os.getpid()
            return self._loop
