"""Threads for plain functions: as many as are blocked, and a new one for each that hangs."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from windlass.service import answer_with, outcome_of

GROW_AFTER = 0.001  # seconds without a free thread: whatever runs is not over in a moment


class ThreadCall:
    """A call that runs, or is to run, in a thread."""

    __slots__ = ("answer", "call", "is_given_up", "is_over", "thread")

    def __init__(self, call: Callable[[], Any], answer: asyncio.Future[Any]) -> None:
        self.call = call
        self.answer = answer  # belongs to the event loop
        self.thread = 0  # which one runs it; none yet
        self.is_over = False  # it has returned, whether or not somebody waits, or will never begin
        self.is_given_up = False  # nobody waits for it


class _Crew:
    """Threads that take calls from one queue."""

    __slots__ = ("free", "started", "work")

    def __init__(self) -> None:
        self.work: SimpleQueue[ThreadCall | None] = SimpleQueue()
        self.free = 0  # threads that wait for work
        self.started = 0


class Threads:
    """Runs calls in threads that are kept and used again.

    The caller bounds how many run at once. Calls that return at once share a few threads: to hand each to
    another one would take longer than they do. If there is none free for a moment there are twice as many.
    A call that was given up keeps its thread until it returns; another takes its place, so a hung handler
    never takes a slot with it.
    """

    def __init__(self, stuck: Callable[[int], None] = lambda _: None) -> None:
        self._tell_stuck = stuck  # how many calls were given up and have not returned
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._crew = _Crew()
        self.stuck = 0  # calls that were given up and have not returned
        self._growing: asyncio.TimerHandle | None = None
        self._ended: deque[tuple[ThreadCall, Any, BaseException | None]] = deque()
        self._is_told = False  # the event loop will look at what has ended

    def submit(self, call: Callable[[], Any]) -> ThreadCall:
        """Run a call in a thread, from the event loop."""
        submitted = ThreadCall(call, self._loop.create_future())
        self._put(submitted)
        return submitted

    def give_up(self, running: ThreadCall) -> None:
        """Wait no longer for a call. Its thread cannot be ended from outside, and is counted."""
        with self._lock:
            if running.is_over:
                return
            running.is_given_up = True
            self.stuck += 1
            stuck = self.stuck
        self._tell_stuck(stuck)

    def close(self) -> None:
        """Let every thread end once it has nothing to do. What is submitted later finds others."""
        if self._growing is not None:
            self._growing.cancel()
            self._growing = None
        crew, self._crew = self._crew, _Crew()
        # Not left to threads that may all be stuck.
        with suppress(Empty):
            while (waiting := crew.work.get_nowait()) is not None:
                self._put(waiting)
        for _ in range(crew.started):
            crew.work.put(None)

    def _put(self, submitted: ThreadCall) -> None:
        self._crew.work.put(submitted)
        if not self._crew.started:
            self._start(1)
        self._look_soon()

    def _look_soon(self) -> None:
        """Look as long as anything waits: how many threads are free is known a moment late."""
        if self._growing is None and self._crew.work.qsize():
            self._growing = self._loop.call_later(GROW_AFTER, self._grow)

    def _grow(self) -> None:
        self._growing = None
        crew = self._crew
        lacking = crew.work.qsize() - crew.free
        if lacking > 0:
            self._start(min(lacking, crew.started))
        self._look_soon()

    def _start(self, number: int) -> None:
        crew = self._crew
        for _ in range(number):
            crew.started += 1
            # Daemons: a handler that never returns must not keep the process alive.
            name = f"windlass-handler-{crew.started}"
            threading.Thread(target=self._run, args=(crew,), name=name, daemon=True).start()

    def _run(self, crew: _Crew) -> None:
        while (submitted := self._next(crew)) is not None:
            if submitted.answer.cancelled():  # before it began
                self._count_end(submitted)
            else:
                submitted.thread = threading.get_ident()
                outcome = outcome_of(submitted.call)
                self._count_end(submitted)
                self._end(submitted, *outcome)
                del outcome
            del submitted

    def _next(self, crew: _Crew) -> ThreadCall | None:
        with self._lock:
            crew.free += 1
        submitted = crew.work.get()
        with self._lock:
            crew.free -= 1
        return submitted

    def _count_end(self, submitted: ThreadCall) -> None:
        with self._lock:
            submitted.is_over = True
            self.stuck -= submitted.is_given_up

    def _end(self, submitted: ThreadCall, value: Any, error: BaseException | None) -> None:
        self._ended.append((submitted, value, error))
        if not self._is_told:
            self._is_told = True
            try:
                self._loop.call_soon_threadsafe(self._answer)
            except RuntimeError:
                return  # the event loop is closed, and nobody waits any more

    def _answer(self) -> None:
        self._is_told = False  # before the look: what ends after it is told again
        while self._ended:
            submitted, value, error = self._ended.popleft()
            answer_with(submitted.answer, value, error)
