"""A call that a breaker let through and that is not made after all gives its place back, at once.

The clocks of these breakers stand still: a place that nobody gives back is never taken for silent.
"""

import asyncio
import logging
from collections.abc import Callable
from uuid import uuid4

import pytest

from windlass import App, Breaker, Budget, Retry, TaskCancelled
from windlass.breaker import ProtectedCall
from windlass.model.breaker import CallOutcome
from windlass.model.task import NewTask
from windlass.runtime.job import Halt

RECOVERY = 30.0


class Down(ConnectionError):  # noqa: N818 - as it is said
    """What a dependency that is down raises."""


class StillClock:
    """Moves when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def breaker_with_one_place(app: App) -> Breaker:
    """Make a breaker that has seen a failure, and would open at the next one: one call at a time."""
    breaker = app.breaker("payments", failures=2, timeout=60)  # so calls wait for seconds
    breaker.reset(StillClock())
    with pytest.raises(Down), breaker:
        raise Down
    return breaker


def half_open_breaker(app: App) -> Breaker:
    """Make a breaker that lets one trial through, of which failures of tasks decide nothing."""
    breaker = app.breaker("payments", failures=1, recovery=RECOVERY, counts=["rate-limited"])
    app.error_rule("rate-limited", type=Down)
    clock = StillClock()
    breaker.reset(clock)
    with pytest.raises(Down), breaker:
        raise Down
    clock.now += RECOVERY
    assert breaker.state == "half-open"
    return breaker


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


async def waiting_call(breaker: Breaker) -> "asyncio.Task[ProtectedCall]":
    call = asyncio.create_task(breaker.begin())
    await asyncio.sleep(0)
    assert not call.done()
    return call


async def is_let_through(breaker: Breaker) -> bool:
    async with breaker:
        return True


async def test_a_call_that_is_cancelled_while_it_waits_takes_no_place() -> None:
    breaker = breaker_with_one_place(App("memory:"))
    under_way = await breaker.begin()
    waiting = await waiting_call(breaker)

    waiting.cancel()
    await asyncio.wait([waiting])
    under_way.end(CallOutcome.NO_VERDICT)

    assert waiting.cancelled()
    assert await is_let_through(breaker)


async def test_a_call_that_is_cancelled_when_it_was_just_let_through_gives_its_place_back() -> None:
    breaker = breaker_with_one_place(App("memory:"))
    under_way = await breaker.begin()
    waiting = await waiting_call(breaker)

    under_way.end(CallOutcome.NO_VERDICT)  # its place is that of the other now
    waiting.cancel()
    await asyncio.wait([waiting])

    assert waiting.cancelled()
    assert await is_let_through(breaker)


async def test_a_retry_that_its_budget_puts_off_gives_its_place_back(
    app: App, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "windlass")
    breaker = half_open_breaker(app)
    budget = Budget(share=0, window=86_400, at_least=1)
    ran: list[int] = []

    @app.task(
        breaker="payments",
        retry=Retry(max_attempts=5, base=0.01, jitter="none", budget=budget),
    )
    async def work() -> None:
        ran.append(len(ran))
        raise TimeoutError("of no interest to the breaker")

    await work.enqueue()
    async with app.worker():
        await until(lambda: "retry.put_off" in caplog.text)

        assert await is_let_through(breaker)

    assert ran == [0, 1]
    assert breaker.state == "closed"


async def test_a_task_whose_arguments_do_not_fit_gives_its_place_back(app: App) -> None:
    breaker = half_open_breaker(app)

    @app.task(breaker="payments")
    async def work(number: int) -> None: ...

    task = NewTask(uuid4(), "work", '{"number": "seven"}')  # as one of another version enqueues it
    await (await app.store()).enqueue([task])
    await app.run_worker(until_idle=True)

    assert (await app.handle(str(task.id)).get()).status == "failed"
    assert await is_let_through(breaker)


async def test_a_task_that_was_told_to_end_while_it_waited_gives_its_place_back(app: App) -> None:
    breaker = breaker_with_one_place(app)
    under_way = await breaker.begin()

    @app.task(breaker="payments")
    async def work() -> None: ...

    handle = await work.enqueue()
    async with app.worker() as worker:
        await until(lambda: len(breaker._waiting) == 1)
        (job,) = worker._slots.running()
        job.stop(Halt.CANCELLED, "no need")
        under_way.end(CallOutcome.NO_VERDICT)
        with pytest.raises(TaskCancelled, match="no need"):
            await handle.result(timeout=20)

    assert await is_let_through(breaker)
