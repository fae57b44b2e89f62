"""What people may do to a task: cancel, change and reopen it."""

import asyncio

import pytest

from windlass import App, Context, TaskCancelled, TaskState, WrongState


async def test_a_waiting_task_is_cancelled_at_once(app: App) -> None:
    @app.task
    async def work() -> None: ...

    handle = await work.enqueue()

    assert await handle.cancel("not needed") is True
    assert await handle.cancel() is False
    with pytest.raises(TaskCancelled, match="not needed"):
        await handle.result(5)


async def test_a_running_task_is_asked_to_stop(app: App) -> None:
    started = asyncio.Event()
    stopped = asyncio.Event()

    @app.task
    async def endless() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    async with app.worker():
        handle = await endless.enqueue()
        await asyncio.wait_for(started.wait(), 10)
        assert await handle.cancel("enough") is True
        with pytest.raises(TaskCancelled, match="enough"):
            await handle.result(10)

    assert stopped.is_set()


async def test_a_waiting_task_can_be_changed_and_an_ended_one_not(app: App) -> None:
    @app.task
    async def work() -> None: ...

    handle = await work.enqueue()
    await handle.change(priority="critical", queue="fast", delay=60)
    record = await handle.get()
    await handle.cancel()

    assert (record.priority, record.queue, record.status) == (30, "fast", TaskState.SCHEDULED)
    with pytest.raises(WrongState, match="cancelled"):
        await handle.change(priority=1)


async def test_a_dead_task_is_reopened_with_fresh_attempts(app: App) -> None:
    fixed = False

    @app.task(retry=1)
    async def fragile(ctx: Context) -> int:
        if not fixed:
            raise ValueError("not yet")
        return ctx.attempt

    handle = await fragile.enqueue()
    await app.run_worker(until_idle=True)
    fixed = True
    await handle.retry()
    await app.run_worker(until_idle=True)

    record = await handle.get()
    assert (record.status, record.attempts, record.generation) == (TaskState.COMPLETED, 1, 2)
    with pytest.raises(WrongState):
        await handle.retry()
