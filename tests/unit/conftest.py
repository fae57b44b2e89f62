"""Workers whose slots are looked at, and a clock that moves when it is told to."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from unit.moved_clock import MovedClock
from unit.slots_bench import Bench, Make
from windlass.runtime import carrier, slots


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    made: list[Bench] = []

    def make(**settings: Any) -> Bench:
        made.append(Bench(**settings))
        return made[-1]

    yield make
    for bench in made:
        await bench.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> MovedClock:
    """The clock of slots and of those that run what is in them."""
    clock = MovedClock()
    monkeypatch.setattr(slots, "time", clock)
    monkeypatch.setattr(carrier, "time", clock)
    return clock
