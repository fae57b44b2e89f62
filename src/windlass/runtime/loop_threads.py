"""The threads that handlers ask the event loop for, as `asyncio.to_thread` does: none is lost to what hangs."""

import asyncio
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar

from windlass.runtime.threads import ThreadCall, Threads

P = ParamSpec("P")
T = TypeVar("T")

MOST = min(32, (os.cpu_count() or 1) + 4)  # calls at once: as many as asyncio lets run by itself
STUCK_AFTER = 60.0  # seconds: a look-up of a name that nobody waits for any more takes so long


class LoopThreads(ThreadPoolExecutor):
    """Runs calls in the threads of a worker, so many at once. Belongs to its event loop.

    A call that nobody waits for any more goes on, but takes nobody's place. If it does so for long, it is
    counted as one that hangs.
    """

    def __init__(self, threads: Threads) -> None:
        super().__init__(max_workers=1)  # an event loop takes nothing else; it never starts one
        self._shared = threads
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[_Call] = deque()
        self._running = 0

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run a call as soon as there is a place."""
        call = _Call(partial(fn, *args, **kwargs), self._given_up)
        self._waiting.append(call)
        self._begin()
        return call

    def _begin(self) -> None:
        while self._waiting and self._running < MOST:
            call = self._waiting.popleft()
            if call.set_running_or_notify_cancel():
                self._running += 1
                call.begin(self._shared, self._ended)

    def _ended(self) -> None:
        self._running -= 1
        self._begin()

    def _given_up(self, thread_call: ThreadCall) -> None:
        self._ended()
        self._loop.call_later(STUCK_AFTER, self._shared.give_up, thread_call)


class _Call(Future[Any]):
    """A call that runs, or is to run."""

    def __init__(self, call: Callable[[], Any], given_up: Callable[[ThreadCall], None]) -> None:
        super().__init__()
        self._call = call
        self._given_up = given_up
        self._in_thread: ThreadCall | None = None
        self._has_place = False

    def begin(self, threads: Threads, ended: Callable[[], None]) -> None:
        """Run it in a thread."""
        self._has_place = True
        self._in_thread = threads.submit(self._call)
        self._in_thread.answer.add_done_callback(partial(self._end, ended))

    def _end(self, ended: Callable[[], None], answer: asyncio.Future[Any]) -> None:
        if self._has_place:
            self._has_place = False
            ended()
        error = answer.exception()
        if error is None:
            self.set_result(answer.result())
        else:
            self.set_exception(error)

    def cancel(self) -> bool:
        """Do not begin it; if it has begun, it goes on, and nobody waits for it."""
        if super().cancel():
            return True
        if self._has_place and self._in_thread is not None:
            self._has_place = False
            self._given_up(self._in_thread)
        return False
