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


def run(
    main: Coroutine[Any, Any, T], *, leaves_all_but: Collection[threading.Thread] | None = None
) -> T:
    """Run a coroutine, on uvloop where that is installed.

    A handler that ignores its cancellation cannot keep the process: it is left behind. So are all threads
    but those that are named, if they are: an application and its handlers may have started others. A number
    that the coroutine returns is the exit code then.
    """
    factory = asyncio.new_event_loop
    if importlib.util.find_spec("uvloop") is not None:
        factory = importlib.import_module("uvloop").new_event_loop
    loop = factory()
    try:
        result = loop.run_until_complete(main)
    except BaseException as error:
        if _has_threads_left(leaves_all_but):  # for which the error is told first
            _leaving_soon(2 if isinstance(error, ConfigurationError) else 1).start()
        raise
    insisting = _leaving_soon(result)
    if leaves_all_but is not None:
        insisting.start()  # what is cancelled now may block the event loop
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    if left and loop.run_until_complete(asyncio.wait(left, timeout=LEAVE_AFTER))[1]:
        _leave(result)
    loop.run_until_complete(loop.shutdown_asyncgens())
    insisting.cancel()
    if _has_threads_left(leaves_all_but):
        _leave(result)
    loop.close()
    return result


def _has_threads_left(all_but: Collection[threading.Thread] | None) -> bool:
    """Whether threads that may be left go on, for which the interpreter would wait at its end."""
    if all_but is None:
        return False
    until = time.monotonic() + LEAVE_AFTER
    left = [one for one in threading.enumerate() if not one.daemon and one not in all_but]
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
