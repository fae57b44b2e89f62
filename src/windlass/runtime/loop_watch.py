"""Notices that the worker's event loop does not turn, and says who blocks it."""

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from windlass.runtime.job import Job
from windlass.telemetry import emit

BLOCKED_AFTER = 1.0  # seconds without a turn
LOOK_EVERY = 0.25
FRAMES = 12
_WINDLASS = str(Path(__file__).parents[1])


class LoopWatch:
    """Two sides: the worker's event loop turns, and another thread looks whether it does.

    Made in the worker's event loop. Code that holds Python's global lock stops both: then the loop
    tells it by itself, once it turns again.
    """

    def __init__(self, running: Callable[[], list[Job]]) -> None:
        self._running = running
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._turned_at = time.monotonic()
        self._telling = threading.Lock()
        self._told_of = 0.0  # the last turn before the block that was told
        self._frames_below = 0  # of whatever the event loop calls: its own, and of who runs it

    @property
    def silent_for(self) -> float:
        """Seconds since the event loop turned last."""
        return time.monotonic() - self._turned_at

    async def turn(self) -> None:
        """Give signs of life, in the worker's event loop, until cancelled."""
        await asyncio.sleep(0)  # from here on called by the loop, and not by who made the task
        self._frames_below = _depth(sys._getframe())  # noqa: SLF001
        while True:
            self._turned_at = time.monotonic()
            await asyncio.sleep(LOOK_EVERY)
            blocked = time.monotonic() - self._turned_at
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

    def _look(self) -> None:
        turned_at = self._turned_at
        blocked = time.monotonic() - turned_at
        if blocked > BLOCKED_AFTER and self._is_news(turned_at):
            emit("loop.blocked", seconds=round(blocked, 1), **self._whose(), stack=self._stack())

    def _is_news(self, turned_at: float) -> bool:
        """Whether nobody has told of the block after this turn; whoever asks first does."""
        with self._telling:
            told_of, self._told_of = self._told_of, turned_at
            return told_of != turned_at

    def _whose(self) -> dict[str, object]:
        # A handler's own subtask is none of our tasks: then the stack alone tells.
        current = asyncio.current_task(self._loop)
        for job in self._running():
            if job.runner is current:
                return {"type": job.task.type, "task_id": job.task.id}
        return {}

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._thread)  # noqa: SLF001 - the one way to it
        frames = traceback.extract_stack(frame)
        # What the event loop called; it may have called us, and we the handler.
        shown = [one for one in frames[self._frames_below :] if not _is_ours(one)] or frames
        return " > ".join(f"{one.filename}:{one.lineno} {one.name}" for one in shown[-FRAMES:])


def _depth(frame: FrameType) -> int:
    """How many frames there are below this one."""
    below, depth = frame.f_back, 0
    while below is not None:
        below, depth = below.f_back, depth + 1
    return depth


def _is_ours(frame: traceback.FrameSummary) -> bool:
    return frame.filename.startswith(_WINDLASS)
