"""Notices that the worker's event loop does not turn, says who blocks it, and ends that when its time is over."""

import asyncio
import contextvars
import gc
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable
from types import FrameType
from typing import Any

from windlass.context import current_job
from windlass.runtime.interrupting import Interrupter, is_ours
from windlass.runtime.job import GIVE_WAY_WITHIN, Job
from windlass.telemetry import emit

BLOCKED_AFTER = 1.0  # seconds without a turn
LOOK_EVERY = 0.25
FRAMES = 12

GiveUp = Callable[[Job | None], Awaitable[None]]


class LoopWatch:
    """Two sides: the worker's event loop turns, and another thread looks whether it does.

    Made in the worker's event loop. Code that holds Python's global lock stops both: then the loop
    tells it by itself, once it turns again.
    """

    def __init__(
        self,
        running: Callable[[], list[Job]],
        give_up: GiveUp | None = None,
        *,
        must_end: Callable[[], bool] = lambda: False,
    ) -> None:
        self._running = running
        self._give_up = give_up  # the process, which this job blocks, if it is one
        self._must_end = must_end  # everything, whatever time it has
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._turned_at = time.monotonic()
        self._telling = threading.Lock()
        self._told_of = 0.0  # the last turn before the block that was told
        self._interrupter = Interrupter()
        self._insists_on: Job | None = None  # which blocks the loop, and should not
        self._insists_since: float | None = None
        self._asked_at = 0.0  # monotonic, when a signal was sent last

    @property
    def silent_for(self) -> float:
        """Seconds since the event loop turned last."""
        return time.monotonic() - self._turned_at

    async def turn(self) -> None:
        """Give signs of life, in the worker's event loop, until cancelled."""
        await asyncio.sleep(0)  # from here on called by the loop, and not by who made the task
        self._interrupter.frames_below = _depth(sys._getframe())  # noqa: SLF001
        self._interrupter.install()
        try:
            while True:
                self._turned_at = time.monotonic()
                await asyncio.sleep(LOOK_EVERY)
                self._tell_freed(time.monotonic() - self._turned_at)
        finally:
            self._interrupter.remove()

    def _tell_freed(self, blocked: float) -> None:
        if blocked > BLOCKED_AFTER:
            if self._is_news(self._turned_at):
                emit("loop.blocked", seconds=round(blocked, 1), stack="not seen")
            emit("loop.freed", seconds=round(blocked, 1))

    async def watch(self) -> None:
        """Look, from the event loop of another thread, until cancelled."""
        while True:
            began = time.monotonic()
            await asyncio.sleep(LOOK_EVERY)
            if time.monotonic() - began < BLOCKED_AFTER:  # or everything stood still, we as well
                self._look()
                await self._insist()

    def _look(self) -> None:
        turned_at = self._turned_at
        blocked = time.monotonic() - turned_at
        if blocked > BLOCKED_AFTER and self._is_news(turned_at):
            emit("loop.blocked", seconds=round(blocked, 1), **self._whose(), stack=self._stack())

    async def _insist(self) -> None:
        """Interrupt a handler that blocks the loop although its time is over; at last, give up the process."""
        now = time.monotonic()
        if now - self._turned_at < 2 * LOOK_EVERY:
            self._insists_since = None
            return
        blocking, must_end = self._blocking(), self._must_end()
        if must_end and blocking is not None:
            blocking.release()
        if not must_end and (blocking is None or not blocking.is_overdue()):
            self._insists_since = None  # or it has yet to be found out
        elif self._insists_since is None or blocking is not self._insists_on:
            self._insists_on, self._insists_since = blocking, now
        elif now - self._insists_since > GIVE_WAY_WITHIN and self._give_up is not None:
            await self._give_up(blocking)
            return
        self._asked_at = now
        self._interrupter.interrupt()

    def _blocking(self) -> Job | None:
        """Which job blocks the loop: by its own task, by one that it has started, or in a callback."""
        if self._interrupter.met_at >= self._asked_at > self._turned_at:
            return self._interrupter.met
        # Nobody has answered: perhaps it is not in Python. Then what the task says is all there is.
        task = asyncio.current_task(self._loop)
        if task is None:
            return None
        found = next((job for job in self._running() if job.runner is task), None)
        started_by = _context_of(task).get(current_job)
        if found is None and started_by is not None and isinstance(started_by[1], Job):
            found = started_by[1]
        return found

    def _is_news(self, turned_at: float) -> bool:
        """Whether nobody has told of the block after this turn; whoever asks first does."""
        with self._telling:
            told_of, self._told_of = self._told_of, turned_at
            return told_of != turned_at

    def _whose(self) -> dict[str, object]:
        job = self._blocking()  # or the stack alone tells
        return {} if job is None else {"type": job.task.type, "task_id": job.task.id}

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._thread)  # noqa: SLF001 - the one way to it
        frames = traceback.extract_stack(frame)
        # What the event loop called; it may have called us, and we the handler.
        called = frames[self._interrupter.frames_below :]
        shown = [one for one in called if not is_ours(one.filename)] or frames
        return " > ".join(f"{one.filename}:{one.lineno} {one.name}" for one in shown[-FRAMES:])


def _context_of(task: asyncio.Task[Any]) -> contextvars.Context:
    """Where a task finds its variables."""
    if sys.version_info >= (3, 12):
        return task.get_context()
    return next(one for one in gc.get_referents(task) if isinstance(one, contextvars.Context))


def _depth(frame: FrameType) -> int:
    """How many frames there are below this one."""
    below, depth = frame.f_back, 0
    while below is not None:
        below, depth = below.f_back, depth + 1
    return depth
