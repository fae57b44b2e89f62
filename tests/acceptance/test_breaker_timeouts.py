"""Calls that take longer than their breaker allows count, whether or not they can be cut off."""

import asyncio
import threading
import time
from collections.abc import Callable

import pytest

from windlass import App, Retry

SOON = Retry(max_attempts=30, base=0.01, jitter="none")
NEVER = 1000.0  # seconds of recovery: longer than any test


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("use", ["block", "decorated", "task"])
async def test_calls_that_hang_in_threads_open_it_when_their_time_is_over(
    app: App, use: str
) -> None:
    breaker = app.breaker("payments", failures=5, recovery=NEVER, timeout=0.2)
    made, go_on = list[int](), threading.Event()

    def pay(n: int) -> None:
        made.append(n)
        go_on.wait(30)

    @app.task(retry=SOON, breaker="payments" if use == "task" else None)
    def work(n: int) -> None:
        if use == "task":
            pay(n)
        elif use == "decorated":
            breaker(pay)(n)
        else:
            with breaker:
                pay(n)

    async with app.worker(concurrency=50):
        handles = await app.enqueue_many([work.call(n) for n in range(50)])
        await until(lambda: breaker.report().refused == 45)
        assert breaker.state == "open"
        go_on.set()
        for n in made:
            await handles[n].result(timeout=20)

    assert len(made) == 5
    records = [await handle.get() for handle in handles]
    assert {record.attempts for record in records if record.status == "scheduled"} == {0}
    assert sum(record.status == "scheduled" for record in records) == 45
    assert breaker.state == "open"


@pytest.mark.parametrize("use", ["block", "task"])
async def test_a_call_that_takes_too_long_counts_though_it_ends_well(app: App, use: str) -> None:
    breaker = app.breaker("payments", failures=1, recovery=NEVER, timeout=0.05)

    @app.task(breaker="payments" if use == "task" else None)
    def work() -> str:
        if use == "task":
            time.sleep(0.1)
            return "done"
        with breaker:
            time.sleep(0.1)
            return "done"

    async with app.worker():
        assert await (await work.enqueue()).result(timeout=20) == "done"

    assert breaker.report().opened == 1


def test_whoever_looks_sees_that_a_call_goes_on_too_long() -> None:
    breaker = App("memory:").breaker("payments", failures=1, recovery=NEVER, timeout=0.05)
    breaker.__enter__()
    began = time.monotonic()
    while time.monotonic() < began + 0.1:
        pass

    assert breaker.state == "open"
