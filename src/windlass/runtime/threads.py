"""Threads for plain functions: as many as are busy, and a new one for each that hangs."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from windlass.model.limits import shown

_Work = tuple[Future[Any], Callable[[], Any]]


class Threads:
    """Runs calls in threads that are kept and used again.

    The caller bounds how many run at once. A call that was given up keeps its thread until it
    returns; the next call then gets another one, so a hung handler never takes a slot with it.
    """

    def __init__(self) -> None:
        self._work: SimpleQueue[_Work | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._started = 0

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """Run a call in a thread."""
        future: Future[Any] = Future()
        with self._lock:
            if self._idle:
                self._idle -= 1
            else:
                self._started += 1
                # Daemons: a handler that never returns must not keep the process alive.
                name = f"windlass-handler-{self._started}"
                threading.Thread(target=self._run, name=name, daemon=True).start()
        self._work.put((future, call))
        return future

    def close(self) -> None:
        """Let every thread end once it has nothing to do."""
        with self._lock:
            for _ in range(self._started):
                self._work.put(None)
            self._started = self._idle = 0

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            future, call = item
            del item
            if future.set_running_or_notify_cancel():
                try:
                    result = call()
                except (StopIteration, GeneratorExit) as error:
                    # A future refuses the one and a coroutine takes the other for its own end:
                    # whoever waits would do so for ever.
                    wrapped = RuntimeError(f"the handler raised {shown(error)}")
                    wrapped.__cause__ = error
                    future.set_exception(wrapped)
                except BaseException as error:  # noqa: BLE001 - handed to whoever waits
                    future.set_exception(error)
                else:
                    future.set_result(result)
            del future, call
            with self._lock:
                self._idle += 1
