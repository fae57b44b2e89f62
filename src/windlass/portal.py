"""An event loop in a thread of its own, for callers that have none."""

import asyncio
import atexit
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from windlass.service import check_no_event_loop

T = TypeVar("T")

LEAVE_WITHIN = 2.0  # seconds, at the end of the process


class Portal:
    """Runs coroutines for synchronous callers; starts its thread when first used.

    After a fork the child has no thread: it starts its own. At the end of the process `at_exit` is
    run there, so that nothing stays open.
    """

    def __init__(self, at_exit: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._at_exit = at_exit
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        _portals.add(self)

    def call(self, name: str, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine and return its result; `name` is the async method to use instead."""
        check_no_event_loop(f"{name}_sync()", instead=f"await {name}()")
        future = asyncio.run_coroutine_threadsafe(call(), self._started())
        try:
            return future.result()
        except BaseException:
            future.cancel()  # of a caller that was interrupted: nobody waits for it any more
            raise

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop, if there is one by now."""
        return self._loop

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = loop = asyncio.new_event_loop()
                threading.Thread(
                    target=_run, args=(loop,), name="windlass-portal", daemon=True
                ).start()
                # Not at the end of the process: what is open is closed there first.
                weakref.finalize(self, _stop, loop, os.getpid()).atexit = False
            return self._loop

    def leave(self) -> None:
        """Run what is to be done at the end of the process, for a moment at most."""
        if self._loop is None:
            return
        leaving = asyncio.run_coroutine_threadsafe(self._at_exit(), self._loop)
        with suppress(Exception):  # a database that is away, and nobody is left to be told
            leaving.result(LEAVE_WITHIN)

    def forget(self) -> None:
        """Forget the thread, which is not there in a forked child; nor does anybody hold the lock."""
        self._lock = threading.Lock()
        self._loop = None


def _run(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


def _stop(loop: asyncio.AbstractEventLoop, pid: int) -> None:
    if pid == os.getpid():
        loop.call_soon_threadsafe(loop.stop)


_portals: weakref.WeakSet[Portal] = weakref.WeakSet()


def _leave() -> None:
    for portal in list(_portals):
        portal.leave()


def _forget() -> None:
    for portal in list(_portals):
        portal.forget()


atexit.register(_leave)
os.register_at_fork(after_in_child=_forget)
