"""An event loop for callers that have none: one for all of them."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from windlass.portal import Portal


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
    portal = Portal()

    with ThreadPoolExecutor(4) as callers:
        ran = list(callers.map(lambda _: portal.call("x", where), range(4)))

    assert ran == ["windlass-portal"] * 4
    assert len(made) == 1


def test_what_a_call_raises_reaches_its_caller() -> None:
    async def fail() -> None:
        raise LookupError("not here")

    with pytest.raises(LookupError, match="not here"):
        Portal().call("x", fail)
