"""Carriers: which jobs share a task, and what they get of one another."""

import asyncio
import contextvars
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, cast
from uuid import UUID

import pytest

from windlass.model.attempt import AttemptOutcome, Failed, Succeeded
from windlass.model.task import Claim, ClaimedTask
from windlass.runtime import carrier
from windlass.runtime.carrier import Carriers
from windlass.runtime.executor import Executor
from windlass.runtime.job import Job

WITHIN = 10.0  # seconds
DONE = Succeeded()

Handler = Callable[[int], Awaitable[None]]

noted: contextvars.ContextVar[int | None] = contextvars.ContextVar("noted", default=None)


def job(number: int, kind: str = "work") -> Job:
    task = ClaimedTask(UUID(int=number), kind, "q", 10, "{}", 0, 4, 1, None)
    return Job(Claim(UUID(int=9), 1, (task,)), task, 0.0)


class Bench:
    """Slots and an executor in one, for handlers that are given the number of their job."""

    def __init__(self, handler: Handler, slots: int = 1) -> None:
        self._handler = handler
        self._slots = slots
        self._waiting: deque[Job] = deque()
        self._running: set[Job] = set()
        self._emptied = asyncio.Event()
        self.outcomes: list[AttemptOutcome | None] = []
        self.looks = 0
        self.carriers = Carriers(cast("Executor", self), self)

    async def run(self, job: Job) -> AttemptOutcome | None:
        await self._handler(job.task.id.int)
        return DONE

    def peek(self) -> Job | None:
        self.looks += 1
        free = self._waiting and len(self._running) < self._slots
        return self._waiting[0] if free else None

    def begin(self, now: float) -> bool:
        self._running.add(self._waiting.popleft())
        return True

    def end(self, job: Job, outcome: AttemptOutcome | None, now: float) -> None:
        self._running.discard(job)
        self.outcomes.append(outcome)
        if not self._waiting and not self._running:
            self._emptied.set()

    def hand_over(self, jobs: int, first: int = 0) -> None:
        self._emptied.clear()
        self._waiting.extend(job(number) for number in range(first, first + jobs))
        self.carriers.start()

    async def emptied(self) -> None:
        async with asyncio.timeout(WITHIN):
            await self._emptied.wait()

    async def learn(self) -> None:
        """Let it find out that a job ends without waiting."""
        self.hand_over(1, first=1000)
        await self.emptied()
        self.outcomes.clear()


def task_here() -> "asyncio.Task[Any]":
    return cast("asyncio.Task[Any]", asyncio.current_task())


async def test_jobs_that_end_at_once_share_a_task() -> None:
    names = set()

    async def handler(_: int) -> None:
        names.add(task_here().get_name())

    bench = Bench(handler)
    await bench.learn()
    names.clear()
    bench.hand_over(100)
    await bench.emptied()

    assert len(names) == 1
    assert bench.outcomes == [DONE] * 100


async def test_no_job_is_cancelled_by_what_one_before_it_asked_of_the_task() -> None:
    cancelled = []

    async def handler(number: int) -> None:
        cancelled.append(task_here().cancelling())
        if number % 3 == 0:
            task_here().cancel()

    bench = Bench(handler)
    await bench.learn()
    bench.hand_over(100)
    await bench.emptied()

    assert cancelled == [0] * 101


async def test_who_is_to_hear_of_the_end_of_a_task_hears_of_it_before_others_begin() -> None:
    order: list[str] = []

    async def handler(number: int) -> None:
        order.append(f"begun {number}")
        if number == 50:
            task_here().add_done_callback(lambda _: order.append("done"))

    bench = Bench(handler)
    await bench.learn()
    bench.hand_over(100)
    await bench.emptied()

    assert order.index("done") < order.index("begun 51")


async def test_what_begins_as_another_ends_has_nothing_of_its_context() -> None:
    found = []

    async def handler(number: int) -> None:
        found.append(noted.get())
        noted.set(number)
        await asyncio.sleep(0)

    bench = Bench(handler)
    bench.hand_over(10)
    await bench.emptied()

    assert found == [None] * 10


async def test_one_that_waits_keeps_its_context() -> None:
    found = []

    async def handler(number: int) -> None:
        noted.set(number)
        if number == 50:
            await asyncio.sleep(0)
        found.append(noted.get())

    bench = Bench(handler)
    await bench.learn()
    bench.hand_over(100)
    await bench.emptied()

    assert found == [1000, *range(100)]


async def test_one_that_waits_lets_the_others_go_on() -> None:
    let_go, ran = asyncio.Event(), []

    async def handler(number: int) -> None:
        if number == 50:
            await let_go.wait()
        ran.append(number)
        if number == 99:
            let_go.set()

    bench = Bench(handler, slots=2)
    await bench.learn()
    ran.clear()
    bench.hand_over(100)
    await bench.emptied()

    assert ran == [*range(50), *range(51, 100), 50]


async def test_those_of_a_type_that_waits_begin_together() -> None:
    let_go, begun = asyncio.Event(), 0

    async def handler(number: int) -> None:
        nonlocal begun
        if number < 1000:
            begun += 1
            await let_go.wait()

    bench = Bench(handler, slots=101)
    await bench.learn()
    bench.hand_over(1)
    await asyncio.sleep(0)
    bench.hand_over(100)
    await asyncio.sleep(0)
    begun_at_once = begun
    let_go.set()
    await bench.emptied()

    assert begun_at_once == 101


async def test_those_that_end_together_have_others_begin_once() -> None:
    let_go = asyncio.Event()

    async def handler(_: int) -> None:
        await let_go.wait()

    bench = Bench(handler, slots=100)
    bench.hand_over(100)
    await asyncio.sleep(0)
    bench.looks = 0
    let_go.set()
    await bench.emptied()
    await asyncio.sleep(0)

    assert bench.looks == 1


@pytest.mark.parametrize("slots", [1, 100])
async def test_a_type_that_waits_for_a_moment_only_is_known_to_wait(slots: int) -> None:
    async def handler(_: int) -> None:
        await asyncio.sleep(0)

    bench = Bench(handler, slots)
    bench.hand_over(100)
    await bench.emptied()

    assert not bench.carriers._quick


async def test_a_type_that_waits_no_more_shares_a_task_again() -> None:
    waits, names = True, set()

    async def handler(_: int) -> None:
        names.add(task_here().get_name())
        if waits:
            await asyncio.sleep(0)

    bench = Bench(handler)
    bench.hand_over(10)
    await bench.emptied()
    waits = False
    await bench.learn()
    names.clear()
    bench.hand_over(10)
    await bench.emptied()

    assert len(names) == 1


async def test_the_event_loop_turns_between_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carrier, "SLICE", 0.0)
    turns, seen = 0, []

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def handler(_: int) -> None:
        seen.append(turns)

    bench = Bench(handler)
    await bench.learn()
    turning = asyncio.create_task(turn())
    bench.hand_over(100)
    await bench.emptied()
    turning.cancel()

    assert seen[-1] - seen[1] > 90


async def test_a_cancellation_reaches_the_job_that_waits_and_no_other() -> None:
    ran, stopped = [], []
    begun = asyncio.Event()

    async def handler(number: int) -> None:
        if number == 50:
            begun.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                stopped.append(number)
        ran.append(number)

    bench = Bench(handler, slots=2)
    await bench.learn()
    ran.clear()
    bench.hand_over(100)
    await begun.wait()
    (waiting,) = [one for one in bench._running if one.task.id.int == 50]
    assert waiting.runner is not None
    waiting.runner.cancel()
    await bench.emptied()

    assert stopped == [50]
    assert sorted(ran) == list(range(100))


@pytest.mark.parametrize("waits", [False, True])
async def test_a_fault_of_ours_fails_the_job_and_stops_no_other(waits: bool) -> None:
    async def handler(number: int) -> None:
        if waits:
            await asyncio.sleep(0)
        if number == 50:
            raise RuntimeError("a fault of ours")

    bench = Bench(handler)
    await bench.learn()
    bench.hand_over(100)
    await bench.emptied()

    failed = [outcome for outcome in bench.outcomes if isinstance(outcome, Failed)]
    assert len(failed) == 1
    assert "a fault of ours" in failed[0].error
    assert len(bench.outcomes) == 100


async def test_no_job_is_cancelled_by_what_one_before_it_asked_and_took_back() -> None:
    ran = []

    async def handler(number: int) -> None:
        if number == 50:
            task_here().cancel()
            task_here().uncancel()
        if number == 51:
            await asyncio.sleep(0)
        ran.append(number)

    bench = Bench(handler)
    await bench.learn()
    bench.hand_over(100)
    await bench.emptied()

    assert ran == [1000, *range(100)]


async def test_others_go_on_when_somebody_cancels_every_task_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(carrier, "SLICE", 0.0)
    ran = []

    async def handler(number: int) -> None:
        ran.append(number)
        if number == 50:
            asyncio.get_running_loop().call_soon(task_here().cancel)

    bench = Bench(handler)
    await bench.learn()
    bench.hand_over(100)
    await bench.emptied()

    assert ran == [1000, *range(100)]


async def test_a_task_factory_may_be_of_the_old_kind() -> None:
    loop, ran = asyncio.get_running_loop(), []

    async def handler(number: int) -> None:
        ran.append(number)

    bench = Bench(handler)
    loop.set_task_factory(lambda loop, coro: asyncio.Task(coro, loop=loop))
    try:
        bench.hand_over(3)
        await bench.emptied()
    finally:
        loop.set_task_factory(None)

    assert ran == [0, 1, 2]
