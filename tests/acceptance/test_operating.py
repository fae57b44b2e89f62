"""What people may do to a task: cancel, change and reopen it."""

import asyncio
import time

import pytest

from windlass import App, Context, TaskCancelled, TaskState, WrongState


def endless(ctx: Context) -> None:
    while not ctx.cancelled:
        time.sleep(0.01)


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


async def test_the_end_of_a_waiting_task_says_who_asked_and_why(app: App) -> None:
    @app.task
    async def work() -> None: ...

    handle = await work.enqueue()
    await handle.cancel("not needed", by="ops@example.com")

    record = await handle.get()
    assert record.last_error == "not needed (asked for by ops@example.com)"
    assert record.cancelled_by == "ops@example.com"
    with pytest.raises(
        TaskCancelled, match=r"not needed \(asked for by ops@example.com\)"
    ) as raised:
        await handle.result(5)
    assert (raised.value.reason, raised.value.by) == ("not needed", "ops@example.com")


@pytest.mark.parametrize("run", ["async", "thread", "process"])
async def test_the_end_of_a_running_task_says_who_asked_and_why(app: App, run: str) -> None:
    if run == "process":
        app.task(run="process", name="endless")(endless)
    elif run == "thread":
        app.task(name="endless")(endless)
    else:

        @app.task(name="endless")
        async def waiting() -> None:
            await asyncio.Event().wait()

    async with app.worker(concurrency=1):
        handle = await app.enqueue("endless")
        while (await handle.get()).status is not TaskState.RUNNING:
            await asyncio.sleep(0.05)
        await handle.cancel("enough", by="ops")
        await handle.cancel("more than enough", by="others")
        with pytest.raises(TaskCancelled) as raised:
            await handle.result(20)

    assert (raised.value.reason, raised.value.by) == ("enough", "ops")
    record = await handle.get()
    assert (record.cancelled_by, record.attempts, record.errors) == ("ops", 0, ())


async def test_without_a_name_nobody_is_made_up(app: App) -> None:
    @app.task
    async def work() -> None: ...

    handle = await work.enqueue()
    await handle.cancel()

    record = await handle.get()
    assert (record.last_error, record.cancelled_by) == ("cancelled on request", None)
    with pytest.raises(TaskCancelled) as raised:
        await handle.result(5)
    assert (raised.value.reason, raised.value.by) == ("cancelled on request", None)


async def test_a_reopened_task_was_cancelled_by_nobody(app: App) -> None:
    @app.task
    async def work() -> None: ...

    handle = await work.enqueue()
    await handle.cancel(by="ops")
    await handle.retry()

    assert (await handle.get()).cancelled_by is None


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
