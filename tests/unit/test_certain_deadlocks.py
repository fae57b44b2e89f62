"""How long handlers have to wait for results before one of them is told that none can come."""

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest

from unit.moved_clock import MovedClock
from windlass import App, Deadlock
from windlass.model.task import Claim, ClaimedTask, WorkerInfo
from windlass.runtime import deadlocks as deadlocks_module
from windlass.runtime.deadlocks import CERTAIN_AFTER, LIKELY_AFTER, Deadlocks
from windlass.runtime.job import Awaited, Job

WORKER = WorkerInfo(UUID(int=1), "host", 1, "0.1", 2, ("child", "parent"), None)
MOMENT = 0.01  # seconds


class Bench:
    """A worker whose slots are held by handlers that wait, each for a task that nobody runs."""

    def __init__(self, clock: MovedClock) -> None:
        self.clock = clock
        self.app = App("memory:")
        self.jobs: list[Job] = []

        @self.app.task(name="child")
        async def child() -> None: ...

        @self.app.task(name="parent")
        async def parent() -> None: ...

    async def wait(self) -> "asyncio.Future[Any]":
        """Let one more handler begin to wait; return what it hears."""
        handle = await self.app.enqueue("child")
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        number = len(self.jobs) + 1
        task = ClaimedTask(UUID(int=number), "parent", "default", 10, "{}", 0, 4, 1, None)
        job = Job(Claim(UUID(int=100), 1, (task,)), task, self.clock.now)
        job.awaited = [Awaited(UUID(handle.id), self.clock.now, False, answer)]
        self.jobs.append(job)
        return answer

    async def look(self, deadlocks: Deadlocks) -> None:
        await deadlocks._look()
        await asyncio.sleep(0)  # what is told is told by the event loop

    async def deadlocks(self) -> Deadlocks:
        return Deadlocks(
            store=await self.app.store(),
            registry=self.app.registry,
            worker=WORKER,
            held_up=lambda: self.jobs,
            patience=5.0,
        )


@pytest.fixture
async def bench(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    clock = MovedClock()
    monkeypatch.setattr(deadlocks_module, "time", clock)
    bench = Bench(clock)
    yield bench
    await bench.app.close()


async def test_a_handler_is_told_once_all_have_waited_for_a_second_and_not_before(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    deadlocks = await bench.deadlocks()
    first = await bench.wait()
    bench.clock.now += 100 * CERTAIN_AFTER
    last = await bench.wait()

    await bench.look(deadlocks)
    bench.clock.now += CERTAIN_AFTER - MOMENT  # it may go on by itself: it does not only wait
    await bench.look(deadlocks)
    assert not first.done()
    assert not last.done()
    assert "handler.deadlocked" not in caplog.text

    bench.clock.now += 2 * MOMENT
    await bench.look(deadlocks)
    assert isinstance(last.exception(), Deadlock)
    assert not first.done()


async def test_while_others_are_full_it_is_told_after_half_a_minute_and_nobody_is_ended(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    deadlocks = await bench.deadlocks()
    full = WorkerInfo(UUID(int=2), "host", 2, "0.1", 0, ("child",), None)
    await (await bench.app.store()).register(full, lease=timedelta(minutes=5))
    answer = await bench.wait()

    bench.clock.now += LIKELY_AFTER - MOMENT
    await bench.look(deadlocks)
    assert "handler.deadlocked" not in caplog.text

    bench.clock.now += 2 * MOMENT
    await bench.look(deadlocks)
    assert "handler.deadlocked tasks=1 types=['parent'] certain=False" in caplog.text
    assert not answer.done()
