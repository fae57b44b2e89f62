"""A block of the event loop is told once, with whose it was if that can be seen."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from uuid import UUID

import pytest

from unit.moved_clock import MovedClock
from windlass.model.task import Claim, ClaimedTask
from windlass.runtime import loop_watch
from windlass.runtime.job import GIVE_WAY_WITHIN, Job
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


# A handler that should have given way


class Insisting:
    """A watch of a loop that a job blocks, without the signals that would interrupt the test."""

    def __init__(self, clock: MovedClock, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(loop_watch, "LOOK_EVERY", 0.25)
        self._clock = clock
        self.given_up: list[Job | None] = []
        self.must_end = False
        self.job = self.overdue(1)
        self.watch = LoopWatch(lambda: [self.job], self._give_up, must_end=lambda: self.must_end)

    def overdue(self, number: int) -> Job:
        made = job(number, None)
        made.give_way_at = time.monotonic()
        return made

    async def _give_up(self, job: Job | None) -> None:
        self.given_up.append(job)

    async def insist(self, *, after: float) -> None:
        self.job.runner = asyncio.current_task()  # which blocks the loop, as far as can be seen
        self._clock.now += after
        await self.watch._insist()


@pytest.fixture
async def insisting(clock: MovedClock, monkeypatch: pytest.MonkeyPatch) -> Insisting:
    return Insisting(clock, monkeypatch)


async def test_a_process_is_given_up_once_a_job_has_withstood_for_long_and_not_before(
    insisting: Insisting,
) -> None:
    await insisting.insist(after=2.0)
    await insisting.insist(after=GIVE_WAY_WITHIN - 0.01)
    assert insisting.given_up == []

    await insisting.insist(after=0.02)
    assert insisting.given_up == [insisting.job]


async def test_no_process_is_given_up_for_a_job_whose_time_is_not_over(
    insisting: Insisting,
) -> None:
    insisting.job.give_way_at = time.monotonic() + 1000

    for _ in range(3):
        await insisting.insist(after=2 * GIVE_WAY_WITHIN)

    assert insisting.given_up == []


async def test_a_loop_that_has_turned_meanwhile_begins_the_count_anew(
    insisting: Insisting, clock: MovedClock
) -> None:
    await insisting.insist(after=2.0)
    clock.now += 2 * GIVE_WAY_WITHIN
    insisting.watch._turned_at = clock.now

    await insisting.insist(after=0.1)
    await insisting.insist(after=2.0)
    await insisting.insist(after=GIVE_WAY_WITHIN - 0.01)
    assert insisting.given_up == []
    await insisting.insist(after=0.02)
    assert insisting.given_up == [insisting.job]


async def test_another_job_that_blocks_is_given_time_of_its_own(insisting: Insisting) -> None:
    await insisting.insist(after=2.0)
    insisting.job = insisting.overdue(2)

    await insisting.insist(after=2 * GIVE_WAY_WITHIN)
    assert insisting.given_up == []
    await insisting.insist(after=GIVE_WAY_WITHIN + 0.01)
    assert insisting.given_up == [insisting.job]


async def test_a_process_that_must_end_is_given_up_whatever_blocks_it(
    insisting: Insisting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(insisting.watch, "_blocking", lambda: None)
    for _ in range(3):
        await insisting.insist(after=2 * GIVE_WAY_WITHIN)
    assert insisting.given_up == []

    insisting.must_end = True
    await insisting.insist(after=2.0)
    await insisting.insist(after=GIVE_WAY_WITHIN - 0.01)
    assert insisting.given_up == []
    await insisting.insist(after=0.02)
    assert insisting.given_up == [None]
