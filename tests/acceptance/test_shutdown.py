"""A worker that stops finishes what runs, and gives the rest back."""

import asyncio

from windlass import App, TaskState


async def test_at_the_deadline_what_still_runs_goes_back_without_an_attempt(app: App) -> None:
    started = asyncio.Event()

    @app.task
    async def endless() -> None:
        started.set()
        await asyncio.Event().wait()

    async with app.worker(shutdown_timeout=0.05):
        handle = await endless.enqueue()
        await asyncio.wait_for(started.wait(), 10)

    record = await handle.get()
    assert (record.status, record.attempts, record.generation) == (TaskState.PENDING, 0, 2)
    assert await (await app.store()).workers() == []


async def test_a_drain_finishes_what_runs_and_gives_back_what_waits(app: App) -> None:
    started = asyncio.Event()
    finish = asyncio.Event()

    @app.task
    async def slow() -> str:
        started.set()
        await finish.wait()
        return "finished"

    async with app.worker(concurrency=1) as worker:
        first = await slow.enqueue()
        second = await slow.enqueue()
        await asyncio.wait_for(started.wait(), 10)
        worker.stop()
        finish.set()

    assert await first.result(5) == "finished"
    assert (await second.get()).status is TaskState.PENDING
