"""What a worker could not say of its schedules, it says later: but not once it drains."""

import asyncio
from datetime import timedelta
from typing import Any, cast

import pytest

from windlass.model.errors import StoreBusy
from windlass.registry import Registry
from windlass.runtime import announcing
from windlass.runtime.announcing import Announcing
from windlass.service import Stop


class HeldStore:
    """Somebody holds the schedules."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def register_schedules(self, *_: Any) -> None:
        self.asked.set()
        raise StoreBusy("somebody holds them")


class Options:
    """An application that may have had schedules before."""

    owner, schedules = "shop", ()


@pytest.mark.parametrize("drains", [False, True])
async def test_a_worker_that_drains_registers_no_schedules(
    monkeypatch: pytest.MonkeyPatch, drains: bool
) -> None:
    monkeypatch.setattr(announcing, "AGAIN_EVERY", 0.0)
    store, stop, until = HeldStore(), Stop(), Stop()
    told = Announcing(
        store=cast("Any", store),
        registry=Registry(),
        clock=cast("Any", None),
        options=cast("Any", Options()),
        lease=timedelta(seconds=30),
    )
    told.is_complete = False
    if drains:
        until.set()

    running = asyncio.create_task(told.run(stop, until=until))
    for _ in range(50):
        await asyncio.sleep(0)  # a turn of the event loop
    until.set()
    stop.set()
    await running

    assert store.asked.is_set() is not drains
