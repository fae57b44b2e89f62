"""A worker that stops finishes what runs, and gives the rest back."""

import asyncio
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from windlass import App, TaskState
from windlass.model.task import Leadership
from windlass.runtime import worker as worker_module


async def test_at_the_deadline_what_still_runs_goes_back_without_an_attempt(app: App) -> None:
    started = asyncio.Event()
    stopped = asyncio.Event()

    @app.task
    async def endless() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    async with app.worker(shutdown_timeout=0.05):
        handle = await endless.enqueue()
        await asyncio.wait_for(started.wait(), 10)

    assert stopped.is_set()
    record = await handle.get()
    assert (record.status, record.attempts, record.generation) == (TaskState.PENDING, 0, 2)
    assert await (await app.store()).workers() == []


async def test_a_drain_finishes_what_runs_and_gives_back_what_waits(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = asyncio.Event()
    finish = asyncio.Event()

    @app.task
    async def slow() -> str:
        started.set()
        await finish.wait()
        return "finished"

    async with app.worker(concurrency=1) as worker:
        # As if tasks had been short until now: the second waits in the buffer.
        worker._slots._rate, worker._slots._empty_since = 1e9, math.inf
        monkeypatch.setattr(worker._slots, "_measure", lambda _: None)  # nor does it find out
        first, second = await app.enqueue_many([slow.call(), slow.call()])
        await asyncio.wait_for(started.wait(), 10)
        async with asyncio.timeout(10):
            while not worker._slots._waiting:
                await asyncio.sleep(0.01)
        worker.stop()
        finish.set()

    assert await first.result(5) == "finished"
    record = await second.get()
    assert (record.status, record.attempts, record.generation) == (TaskState.PENDING, 0, 2)


async def test_a_handler_that_does_not_give_way_is_left_behind_and_its_task_goes_back(
    app: App,
) -> None:
    started = asyncio.Event()
    finish = asyncio.Event()
    finished = asyncio.Event()

    @app.task
    async def stubborn() -> str:
        started.set()
        while not finish.is_set():
            with suppress(asyncio.CancelledError):
                await finish.wait()
        finished.set()
        return "too late"

    async with app.worker(shutdown_timeout=0.05):
        handle = await stubborn.enqueue()
        await asyncio.wait_for(started.wait(), 10)
    was_finished = finished.is_set()
    finish.set()
    await asyncio.wait_for(finished.wait(), 10)

    record = await handle.get()
    assert not was_finished
    assert (record.status, record.attempts, record.generation) == (TaskState.PENDING, 0, 2)


@pytest.mark.parametrize("beside", [True, False])
async def test_a_worker_that_is_cancelled_while_it_starts_is_gone(app: App, beside: bool) -> None:
    starting = asyncio.Event()
    stopped = asyncio.Event()

    @app.on_startup
    async def hang() -> None:
        starting.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    async def work() -> None:
        if beside:
            async with app.worker():
                pass
        else:
            await app.run_worker()

    working = asyncio.create_task(work())
    await asyncio.wait_for(starting.wait(), 10)
    working.cancel()
    await asyncio.wait([working], timeout=10)

    assert working.cancelled()
    assert stopped.is_set()
    assert await (await app.store()).workers() == []


async def test_a_worker_that_is_asked_to_stop_while_it_starts_ends_without_an_error(
    app: App,
) -> None:
    starting = asyncio.Event()

    @app.on_startup
    async def hang() -> None:
        starting.set()
        await asyncio.Event().wait()

    worker = await app.new_worker()
    running = asyncio.create_task(worker.run())
    await asyncio.wait_for(starting.wait(), 10)
    worker.stop()
    await asyncio.wait_for(running, 10)

    assert await (await app.store()).workers() == []


async def test_a_worker_that_is_cancelled_drains(app: App) -> None:
    started = asyncio.Event()
    finish = asyncio.Event()

    @app.task
    async def slow() -> str:
        started.set()
        await finish.wait()
        return "finished"

    handle = await slow.enqueue()
    working = asyncio.create_task(app.run_worker())
    await asyncio.wait_for(started.wait(), 10)
    working.cancel()
    await asyncio.sleep(0)
    finish.set()
    await asyncio.wait([working], timeout=10)

    assert working.cancelled()
    assert await handle.result(5) == "finished"


async def test_a_worker_that_cannot_start_says_why(app: App) -> None:
    @app.on_startup
    async def connect() -> None:
        raise LookupError("no mail server")

    with pytest.raises(LookupError, match="mail server"):
        async with app.worker():
            pytest.fail("it has not started")
    with pytest.raises(LookupError, match="mail server"):
        await app.run_worker()


async def test_a_worker_that_cannot_start_says_why_even_if_it_cannot_leave_either(app: App) -> None:
    @app.on_startup
    async def connect() -> None:
        raise LookupError("no mail server")

    @app.on_shutdown
    async def disconnect() -> None:
        raise ValueError("was not connected")

    with pytest.raises(LookupError, match="mail server"):
        await app.run_worker()


async def test_a_shut_down_hook_that_raises_keeps_none_of_the_others(app: App) -> None:
    ran: list[str] = []

    @app.on_shutdown
    async def broken() -> None:
        raise LookupError("no mail server")

    @app.on_shutdown
    def close() -> None:
        ran.append("closed")

    with pytest.raises(LookupError, match="mail server"):
        await app.run_worker(until_idle=True)
    app.on_shutdown(broken)
    with pytest.raises(ExceptionGroup) as both:
        await app.run_worker(until_idle=True)
    assert len(both.value.exceptions) == 2
    ran.pop()

    assert ran == ["closed"]


async def test_a_worker_that_stops_says_what_it_waits_for(
    app: App, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "windlass")

    @app.task
    async def slow() -> None:
        worker.stop()
        while not any(line.startswith("worker.stopping") for line in caplog.messages):
            await asyncio.sleep(0.01)

    await slow.enqueue()
    worker = await app.new_worker()
    await worker.run()

    said = [line for line in caplog.messages if line.startswith("worker.stopping")]
    assert len(said) == 1
    assert said[0].endswith("tasks=1")


async def test_a_worker_that_cannot_give_up_its_seat_says_so_and_ends(
    app: App, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, resigning = await app.store(), asyncio.Event()

    async def held(_: Leadership) -> None:
        resigning.set()
        await asyncio.Future()

    monkeypatch.setattr(store, "resign", held)
    monkeypatch.setattr(worker_module, "LEAVE_WITHIN", 0.2)
    caplog.set_level("INFO", logger="windlass")
    async with app.worker():
        while "leader.elected" not in caplog.text:
            await asyncio.sleep(0.01)

    assert resigning.is_set()
    assert "store.unavailable doing=stop error=windlass-leader did not end" in caplog.text


async def test_a_worker_starts_and_stops_although_every_thread_of_the_event_loop_hangs(
    app: App,
) -> None:
    go_on = threading.Event()
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    hanging = asyncio.create_task(asyncio.to_thread(go_on.wait, 60))
    await asyncio.sleep(0)

    @app.task
    async def work() -> str:
        return "done"

    async with asyncio.timeout(30):
        async with app.worker():
            assert await (await work.enqueue()).result() == "done"
    assert not hanging.done()
    go_on.set()
    await hanging
