"""A handler that waits for a task which no slot is left for is told so, instead of waiting for ever."""

import asyncio

import pytest

from acceptance.quick import QUICK
from windlass import App, Deadlock, TaskState
from windlass.runtime import deadlocks

WITHIN = 30.0  # seconds


@pytest.mark.parametrize("slots", [1, 3])
async def test_a_handler_that_would_wait_for_ever_is_told_so(
    app: App, caplog: pytest.LogCaptureFixture, slots: int
) -> None:
    @app.task
    async def child() -> int:
        return 7

    @app.task(retry=1)
    async def parent() -> int:
        result: int = await (await child.enqueue()).result()
        return result

    handles = [await parent.enqueue() for _ in range(slots)]
    async with asyncio.timeout(WITHIN):
        await app.run_worker(until_idle=True, concurrency=slots)

    ends = [await handle.get() for handle in handles]
    told = [one for one in ends if one.status is TaskState.DEAD]
    # The first slot that comes free is enough for the tasks of all others.
    assert len(told) == 1
    error = told[0].errors[-1]
    assert (error["type"], error["class"]) == ("Deadlock", "transient")
    assert f"the slots of this worker ({slots}) are all held" in error["message"]
    assert "raise concurrency" in error["message"]
    assert [one.result for one in ends if one.status is TaskState.COMPLETED] == [7] * (slots - 1)
    assert f"handler.deadlocked tasks={slots} types=['parent']" in caplog.text


async def test_one_in_a_thread_is_told_too(app: App) -> None:
    caught = []

    @app.task
    async def child() -> int:
        return 7

    @app.task(retry=1)
    def parent() -> None:
        try:
            child.enqueue_sync().result_sync()
        except Deadlock as error:
            caught.append(str(error))

    await parent.enqueue()
    async with asyncio.timeout(WITHIN):
        await app.run_worker(until_idle=True, concurrency=1)

    assert len(caught) == 1


async def test_one_that_waits_for_so_long_only_waits_so_long(
    app: App, caplog: pytest.LogCaptureFixture
) -> None:
    @app.task
    async def child() -> int:
        return 7

    @app.task(retry=1)
    async def parent() -> str:
        handle = await child.enqueue()
        try:
            await handle.result(timeout=2.5)
        except TimeoutError as error:
            return str(error)
        return "it came"

    handle = await parent.enqueue()
    async with asyncio.timeout(WITHIN):
        await app.run_worker(until_idle=True, concurrency=1)

    assert "has not ended within 2.5 s" in (await handle.get()).result
    assert "handler.deadlocked" in caplog.text


async def test_a_result_that_another_worker_brings_is_waited_for(
    database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with App(database_url, **QUICK) as app:
        begun = asyncio.Event()

        @app.task(queue="parents", retry=1)
        async def parent() -> int:
            handle = await child.enqueue()
            begun.set()
            result: int = await handle.result()
            return result

        @app.task(queue="children")
        async def child() -> int:
            await asyncio.sleep(2.5)  # longer than it takes to be certain
            return 7

        handle = await parent.enqueue()
        async with app.worker(queues=["parents", "children"], concurrency=1):
            await begun.wait()
            async with app.worker(queues=["children"], concurrency=1):
                assert await handle.result(timeout=WITHIN) == 7

    assert "handler.deadlocked" not in caplog.text


async def test_where_others_might_help_but_are_full_it_is_only_told(
    database_url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlocks, "LIKELY_AFTER", 1.0)
    async with App(database_url, **QUICK) as app:

        @app.task
        async def child() -> int:
            return 7

        @app.task(retry=1)
        async def parent() -> int:
            result: int = await (await child.enqueue()).result()
            return result

        handles = [await parent.enqueue() for _ in range(2)]
        async with app.worker(concurrency=1), app.worker(concurrency=1), asyncio.timeout(WITHIN):
            while caplog.text.count("certain=False") < 2:
                await asyncio.sleep(0.05)
            async with app.worker(concurrency=1):
                assert [await handle.result() for handle in handles] == [7, 7]

    assert caplog.text.count("handler.deadlocked") == 2


async def test_handlers_that_leave_a_slot_wait(app: App, caplog: pytest.LogCaptureFixture) -> None:
    @app.task
    async def child() -> int:
        await asyncio.sleep(2.0)
        return 7

    @app.task(retry=1)
    async def parent() -> int:
        result: int = await (await child.enqueue()).result()
        return result

    handle = await parent.enqueue()
    async with asyncio.timeout(WITHIN):
        await app.run_worker(until_idle=True, concurrency=2)

    assert (await handle.get()).result == 7
    assert "handler.deadlocked" not in caplog.text
