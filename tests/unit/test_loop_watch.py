"""A block of the event loop is told once, with whose it was if that can be seen."""

import asyncio
import logging
from collections.abc import AsyncIterator
from uuid import UUID

import pytest

from unit.moved_clock import MovedClock
from windlass.model.task import Claim, ClaimedTask
from windlass.runtime import loop_watch
from windlass.runtime.job import Job
from windlass.runtime.loop_watch import LoopWatch


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> MovedClock:
    clock = MovedClock()
    monkeypatch.setattr(loop_watch, "time", clock)
    monkeypatch.setattr(loop_watch, "LOOK_EVERY", 0.0)
    return clock


@pytest.fixture
async def watch(clock: MovedClock, running: list[Job]) -> AsyncIterator[LoopWatch]:
    watch = LoopWatch(lambda: running)
    turning = asyncio.create_task(watch.turn())
    await turns()
    yield watch
    turning.cancel()


@pytest.fixture(autouse=True)
def hearing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "windlass")


@pytest.fixture
def running() -> list[Job]:
    return []


async def turns() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def job(number: int, runner: "asyncio.Task[None] | None") -> Job:
    task = ClaimedTask(UUID(int=number), f"type-{number}", "q", 10, "{}", 0, 4, 1, None)
    made = Job(Claim(UUID(int=100), 1, (task,)), task, 5.0, started_at=7.0)
    made.runner = runner
    return made


@pytest.mark.usefixtures("watch")
async def test_a_block_in_which_nobody_could_look_is_told_when_it_is_over(
    clock: MovedClock, caplog: pytest.LogCaptureFixture
) -> None:
    clock.now += 5  # and nobody looked: all of Python stood still
    await turns()

    assert caplog.messages[0] == "loop.blocked seconds=5.0 stack=not seen"
    assert [line.partition(" ")[0] for line in caplog.messages] == ["loop.blocked", "loop.freed"]


async def test_a_block_that_was_seen_is_told_once(
    watch: LoopWatch, clock: MovedClock, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        clock.now += 2
        watch._look()
    await turns()

    assert [line.partition(" ")[0] for line in caplog.messages] == ["loop.blocked", "loop.freed"]
    assert "test_loop_watch.py" in caplog.messages[0]


async def test_the_next_block_is_told_too(
    watch: LoopWatch, clock: MovedClock, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        clock.now += 2
        watch._look()
        await turns()

    assert [line.partition(" ")[0] for line in caplog.messages] == [
        "loop.blocked",
        "loop.freed",
    ] * 2


@pytest.mark.parametrize("is_mine", [True, False])
async def test_of_all_that_run_the_one_that_blocks_is_named_or_none(
    watch: LoopWatch,
    running: list[Job],
    clock: MovedClock,
    caplog: pytest.LogCaptureFixture,
    is_mine: bool,
) -> None:
    running += [job(1, None), job(2, asyncio.current_task() if is_mine else None)]
    clock.now += 2
    watch._look()

    assert "type-1" not in caplog.text
    assert (f"type=type-2 task_id={UUID(int=2)}" in caplog.text) == is_mine


async def test_nobody_is_accused_of_a_process_that_stood_still_as_a_whole(
    clock: MovedClock, caplog: pytest.LogCaptureFixture
) -> None:
    watch = LoopWatch(list)
    # The one who looks is the first to go on, and finds that the other has not turned.
    both = [asyncio.create_task(watch.watch()), asyncio.create_task(watch.turn())]
    await turns()
    clock.now += 5
    await turns()
    for each in both:
        each.cancel()

    assert caplog.messages[0] == "loop.blocked seconds=5.0 stack=not seen"


async def test_a_block_that_both_threads_see_at_once_is_told_once(
    watch: LoopWatch, clock: MovedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    def let_the_other_look_meanwhile(event: str, **_: object) -> None:
        told.append(event)
        if event == "loop.blocked":
            watch._look()

    monkeypatch.setattr(loop_watch, "emit", let_the_other_look_meanwhile)
    clock.now += 5
    await turns()

    assert told == ["loop.blocked", "loop.freed"]
