"""An event loop for callers that have none: one for all of them."""

import asyncio
import gc
import os
import signal
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest

from windlass import portal as portals
from windlass.portal import Portal


async def nothing() -> None: ...


async def where() -> str:
    return threading.current_thread().name


def test_callers_that_come_at_once_share_one_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[asyncio.AbstractEventLoop] = []
    new_event_loop = asyncio.new_event_loop

    def slowly() -> asyncio.AbstractEventLoop:
        time.sleep(0.05)  # so that the others come while the first is at it
        made.append(new_event_loop())
        return made[-1]

    monkeypatch.setattr(asyncio, "new_event_loop", slowly)
    portal = Portal(at_exit=nothing)

    with ThreadPoolExecutor(4) as callers:
        ran = list(callers.map(lambda _: portal.call("x", where), range(4)))

    assert ran == ["windlass-portal"] * 4
    assert len(made) == 1


def test_what_a_call_raises_reaches_its_caller() -> None:
    async def fail() -> None:
        raise LookupError("not here")

    with pytest.raises(LookupError, match="not here"):
        Portal(at_exit=nothing).call("x", fail)


def test_what_is_open_is_closed_at_the_end_of_the_process() -> None:
    closed: list[str] = []

    async def close() -> None:
        closed.append(threading.current_thread().name)

    portal = Portal(at_exit=close)
    portal.leave()
    assert closed == []  # nothing was opened
    portal.call("x", where)
    portal.leave()

    assert closed == ["windlass-portal"]


def test_what_cannot_be_closed_does_not_keep_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang() -> None:
        await asyncio.Event().wait()

    async def fail() -> None:
        raise LookupError("gone")

    monkeypatch.setattr(portals, "LEAVE_WITHIN", 0.05)
    for at_exit in (hang, fail):
        portal = Portal(at_exit=at_exit)
        portal.call("x", where)
        portal.leave()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_does_not_wait_for_a_thread_that_only_its_parent_has() -> None:
    portal = Portal(at_exit=nothing)
    portal.call("x", where)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # there are threads, on purpose
        with portal._lock:  # as a thread may that is just about to start the loop
            child = os.fork()
            if not child:
                signal.alarm(10)
                os._exit(0 if portal.call("x", where) == "windlass-portal" else 1)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_the_thread_ends_with_its_portal() -> None:
    portal = Portal(at_exit=nothing)

    async def this() -> threading.Thread:
        return threading.current_thread()

    thread = portal.call("x", this)
    del portal
    gc.collect()
    thread.join(10)

    assert not thread.is_alive()
