"""A worker keeps some tasks ready, neither too many nor for too long."""

import asyncio
import math

from windlass import App


async def test_what_waits_in_the_buffer_for_too_long_is_given_back(app: App) -> None:
    hold = asyncio.Event()

    @app.task
    async def quick() -> None: ...

    @app.task
    async def slow() -> None:
        await hold.wait()

    async with app.worker(concurrency=1) as busy:
        # As if tasks had been short until now.
        busy._slots._rate, busy._slots._empty_since = 1000.0, math.inf
        handles = [await slow.enqueue() for _ in range(5)]
        async with asyncio.timeout(10):
            while 1 in [(await handle.get()).generation for handle in handles[1:]]:
                busy._slots._rate = 1000.0
                await asyncio.sleep(0.05)
        hold.set()
        for handle in handles:
            await handle.result(10)
