"""A new process in place of this one: the same command, number and environment, and nothing else of it."""

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Never

from windlass.telemetry import emit

FLUSH_WITHIN = 1.0  # seconds: a thread that is lost may hold what is to be flushed
FAILED = 1  # the exit code

_folder = os.getcwd()  # noqa: PTH109 - where the command was begun: a handler may be elsewhere by now
_noted: set[int] = set()  # signals that the event loop may not have heard of


def note_signal(signum: int, tell: Callable[[], None]) -> None:
    """Remember a signal also while the event loop does not turn, and tell of it. It hears of it in its own way."""

    def note(*_: object) -> None:
        _noted.add(signum)
        tell()

    signal.signal(signum, note)
    signal.siginterrupt(signum, False)


def reap_left_over() -> None:
    """Let go of processes that the one before us has started and left: they are ours, and have ended."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            continue


def replace_process(*, is_stopping: Callable[[], bool]) -> Never:
    """Begin anew; or end, if that is what was asked for. No thread goes on. From any thread."""
    flushing = threading.Thread(target=_flush, daemon=True)
    flushing.start()
    flushing.join(FLUSH_WITHIN)
    if not _noted and not is_stopping():
        try:
            os.chdir(_folder)
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - our own command
        except OSError as error:
            emit("service.failed", service="windlass-replacing", error=error)
    os._exit(FAILED)


def _flush() -> None:
    for handler in logging.getLogger().handlers:
        handler.flush()
    sys.stdout.flush()
