"""Running the coroutine of a command, and ending the process whatever it has left behind."""

import asyncio
import importlib
import importlib.util
import logging
import os
import sys
import threading
import time
from collections.abc import Collection, Coroutine
from typing import Any, TypeVar

from windlass.model.errors import ConfigurationError

T = TypeVar("T")

LEAVE_AFTER = 1.0  # seconds for what was cancelled to end


def run(main: Coroutine[Any, Any, T], *, leaves_threads: bool = False) -> T:
    """Run a coroutine, on uvloop where that is installed.

    A handler that ignores its cancellation cannot keep the process: it is left behind, and so are threads
    that handlers have started, where they may. A number that the coroutine returns is the exit code then.
    """
    factory = asyncio.new_event_loop
    if importlib.util.find_spec("uvloop") is not None:
        factory = importlib.import_module("uvloop").new_event_loop
    loop = factory()
    before = threading.enumerate()
    try:
        result = loop.run_until_complete(main)
    except BaseException as error:
        if leaves_threads and _has_threads_left(before):  # for which the error is told first
            _leaving_soon(2 if isinstance(error, ConfigurationError) else 1).start()
        raise
    insisting = _leaving_soon(result)
    if leaves_threads:
        insisting.start()  # what is cancelled now may block the event loop
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    if left and loop.run_until_complete(asyncio.wait(left, timeout=LEAVE_AFTER))[1]:
        _leave(result)
    loop.run_until_complete(loop.shutdown_asyncgens())
    insisting.cancel()
    if leaves_threads and _has_threads_left(before):
        _leave(result)
    loop.close()
    return result


def _has_threads_left(before: Collection[threading.Thread]) -> bool:
    """Whether threads that handlers have started go on, for which the interpreter would wait at its end."""
    until = time.monotonic() + LEAVE_AFTER
    left = [one for one in threading.enumerate() if not one.daemon and one not in before]
    for thread in left:
        thread.join(max(0.0, until - time.monotonic()))
    return any(thread.is_alive() for thread in left)


def _leaving_soon(result: object) -> threading.Timer:
    leaving = threading.Timer(2 * LEAVE_AFTER, _leave, (result,))
    leaving.daemon = True
    return leaving


def _leave(result: object) -> None:
    logging.shutdown()
    sys.stdout.flush()
    os._exit(result if isinstance(result, int) else 0)
