"""Ends a handler that blocks the event loop although its time is over: an exception in its own code.

A coroutine is cancelled where it waits. One that computes, sleeps or asks a server without waiting for
the event loop never comes there, and nor does any other handler meanwhile. Only a signal reaches it:
Python runs what handles it in the main thread, between two steps of whatever runs there or in place of
a system call that waits, and what that raises is raised there.
"""

import asyncio
import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType

from windlass.context import current_job
from windlass.runtime.job import Job

SIGNAL = signal.SIGURG  # means nothing to a process that does not ask for it
_WINDLASS = Path(__file__).parents[1]
_OURS = f"{_WINDLASS}{os.sep}"
# Ours that call what users have written. Whatever else of ours a handler calls is not cut off in the middle.
_CALLERS = frozenset(
    str(_WINDLASS / file)
    for file in ("breaker.py", "codec.py", "runtime/carrier.py", "runtime/executor.py")
)
_ASYNCIO = str(Path(asyncio.__file__).parent)

_installed: list["Interrupter"] = []


class Overran(BaseException):
    """An attempt took longer than its timeout; a TimeoutError of the handler's own is not this.

    No Exception, as a cancellation is none: handlers that go on after any error are not to go on after this.
    """

    def __init__(self, seconds: float, how: str = "") -> None:
        super().__init__(f"took longer than {seconds:g} s{how}")


class Interrupter:
    """Interrupts handlers that run in one event loop. Works where that is the loop of the main thread."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.frames_below = 0  # of whatever the event loop calls: its own, and of who runs it
        self.met: Job | None = None  # whose code ran when the last signal came
        self.met_at = 0.0  # monotonic

    def install(self) -> None:
        """Take the signal, unless somebody else has a use for it. In the event loop's thread."""
        if threading.current_thread() is not threading.main_thread():
            return
        if not _installed:
            if signal.getsignal(SIGNAL) is not signal.SIG_DFL:
                return
            signal.signal(SIGNAL, _interrupt)
        _installed.append(self)

    def remove(self) -> None:
        """Give the signal back."""
        if self in _installed:
            _installed.remove(self)
            if not _installed:
                signal.signal(SIGNAL, signal.SIG_DFL)

    def interrupt(self) -> None:
        """Find out what runs now, and end it if it is a handler whose time is over. From any thread."""
        main = threading.main_thread().ident
        if self in _installed and main is not None:
            signal.pthread_kill(main, SIGNAL)


def _interrupt(_: int, frame: FrameType | None) -> None:
    """Raise in the code of a handler whose time is over. By Python, in the main thread."""
    current = current_job.get()  # also in what a handler has started
    job = current[1] if current is not None and isinstance(current[1], Job) else None
    loop = asyncio._get_running_loop()  # noqa: SLF001 - there may be none
    for interrupter in _installed:
        if interrupter.loop is loop:
            interrupter.met, interrupter.met_at = job, time.monotonic()
    if job is not None and job.is_overdue() and _is_users(frame):
        limit = (job.give_way_at or 0.0) - (job.started_at or 0.0)
        raise Overran(limit, "; it blocked the event loop, and was interrupted")


def is_ours(file: str) -> bool:
    """Whether code of a file is a part of Windlass."""
    return file.startswith(_OURS)


def _is_users(frame: FrameType | None) -> bool:
    """Whether what runs is a handler's, or was called by it: not ours, and not the event loop's."""
    loop = asyncio._get_running_loop()  # noqa: SLF001 - there may be none
    below = next((one.frames_below for one in _installed if one.loop is loop), None)
    if below is None:
        return False
    frames = []
    while frame is not None:
        frames.append(frame.f_code.co_filename)
        frame = frame.f_back
    called = frames[: len(frames) - below]  # the innermost first
    if not called or called[0].startswith(_ASYNCIO):
        return False
    ours = next(filter(is_ours, called), None)
    return ours != called[0] and (ours is None or ours in _CALLERS)
