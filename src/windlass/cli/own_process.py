"""The process of `windlass worker`: asked to stop by signals, and replaced by a new one when it is of no use."""

import asyncio
import faulthandler
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Never

from windlass.telemetry import emit

DEFAULTS: dict[signal.Signals, Any] = {
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGINT: signal.default_int_handler,
}  # which of them ask, and what they do otherwise
FLUSH_WITHIN = 1.0  # seconds: a thread that is lost may hold what is to be flushed
FAILED = 1  # the exit code
TRACEBACK = b"(most recent call first)"  # written once for each signal
READ_AT_ONCE = 1 << 16  # bytes

_folder = os.getcwd()  # noqa: PTH109 - where the command was begun: a handler may be elsewhere by now


class OwnProcess:
    """This process, as long as a worker has it to itself.

    A signal's handler in Python waits for the main thread to be in Python again, and a task may keep it in C
    code for ever. What the interpreter has for crashes does not wait: it writes a traceback at once, here to a
    pipe, and passes the signal on. So one that was asked to stop knows that, whatever its tasks do.
    """

    def __init__(self, stop: Callable[[], None]) -> None:
        self.stop = stop  # called in the event loop for each signal; may be another one later
        self._said, self._saying = os.pipe()
        os.set_blocking(self._said, False)
        os.set_blocking(self._saying, False)  # rather than in the middle of anything
        self._handlers: dict[signal.Signals, object] = {}  # of the event loop
        self._heard = b""
        self._reading = threading.Lock()

    def listen(self) -> None:
        """Listen for signals from here on, in the running event loop."""
        loop = asyncio.get_running_loop()
        for signum in DEFAULTS:
            faulthandler.unregister(signum)  # of the application: it would not be put in again
            loop.add_signal_handler(signum, self._tell)
            self._handlers[signum] = signal.getsignal(signum)
            faulthandler.register(signum, self._saying, all_threads=False, chain=True)
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """In a copy that a handler has forked: what ends that asks nobody else, and does end it."""
        signal.set_wakeup_fd(-1)  # of the event loop, which shares it
        for signum, handler in self._handlers.items():
            faulthandler.unregister(signum)
            if signal.getsignal(signum) == handler:  # or the application has its own
                signal.signal(signum, DEFAULTS[signum])

    def _tell(self) -> None:
        self.stop()

    def times_asked(self) -> int:
        """How often it was asked to stop. From any thread."""
        with self._reading, suppress(BlockingIOError):
            while True:
                self._heard += os.read(self._said, READ_AT_ONCE)
        return self._heard.count(TRACEBACK)

    def replace(self) -> Never:
        """Begin anew: the same command, number and environment, and nothing else; or end, if it was asked to stop.

        No thread goes on. From any thread.
        """
        flushing = threading.Thread(target=_flush, daemon=True)
        flushing.start()
        flushing.join(FLUSH_WITHIN)
        if not self.times_asked():
            try:
                os.chdir(_folder)
                os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - our own command
            except OSError as error:
                emit("service.failed", service="windlass-replacing", error=error)
        os._exit(FAILED)


def reap_left_over() -> None:
    """Let go of processes that the one before us has started and left: they are ours, and have ended."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            continue


def _flush() -> None:
    for handler in logging.getLogger().handlers:
        handler.flush()
    sys.stdout.flush()
