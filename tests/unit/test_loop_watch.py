"""Who tells of an event loop that did not turn: one of two threads, and once."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from unit.moved_clock import MovedClock
from windlass.runtime import loop_watch
from windlass.runtime.loop_watch import LoopWatch


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> MovedClock:
    """Ours; the first sleep of anybody takes five seconds, and the next one does not end."""
    clock = MovedClock()
    slept: set[asyncio.Task[Any] | None] = set()
    sleep = asyncio.sleep

    async def sleep_on(_: float) -> None:
        if asyncio.current_task() in slept:
            await asyncio.Event().wait()
        slept.add(asyncio.current_task())
        clock.now += 5
        await sleep(0)

    monkeypatch.setattr(loop_watch, "time", clock)
    monkeypatch.setattr(asyncio, "sleep", sleep_on)
    return clock


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    told: list[tuple[str, Any]] = []
    monkeypatch.setattr(
        loop_watch, "emit", lambda event, **said: told.append((event, said.get("stack")))
    )
    return told


async def for_a_while(*running: Coroutine[Any, Any, None]) -> None:
    sides = [asyncio.create_task(each) for each in running]
    await asyncio.wait(sides, timeout=0.2)
    for side in sides:
        side.cancel()
    await asyncio.wait(sides)


@pytest.mark.usefixtures("clock")
async def test_nobody_is_accused_of_a_process_that_stood_still_as_a_whole(
    told: list[tuple[str, Any]],
) -> None:
    watch = LoopWatch(list)
    await for_a_while(watch.watch(), watch.turn())

    assert told == [("loop.blocked", "not seen"), ("loop.freed", None)]


@pytest.mark.usefixtures("clock")
async def test_a_block_that_both_threads_see_at_once_is_told_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch = LoopWatch(list)
    told: list[str] = []

    def let_the_other_look_meanwhile(event: str, **_: Any) -> None:
        told.append(event)
        if event == "loop.blocked":
            watch._look()

    monkeypatch.setattr(loop_watch, "emit", let_the_other_look_meanwhile)
    await for_a_while(watch.turn())

    assert told == ["loop.blocked", "loop.freed"]
