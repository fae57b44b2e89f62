"""A worker runs tasks: which, where, in which order, with what around them."""

import asyncio
import functools
import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from windlass import App, ConfigurationError, Context, TaskSet, TaskState


async def test_a_task_runs_and_its_result_comes_back(app: App) -> None:
    @app.task
    async def add(a: int, b: int = 2) -> int:
        return a + b

    handle = await add.enqueue(1)
    await app.run_worker(until_idle=True)

    assert await handle.result(5) == 3
    record = await handle.get()
    assert record.status is TaskState.COMPLETED
    assert record.attempts == 1
    assert record.started_at is not None
    assert record.claimed_at is not None
    assert record.completed_at is not None
    assert record.created_at <= record.claimed_at <= record.started_at <= record.completed_at


async def test_a_direct_call_simply_runs_the_function(app: App) -> None:
    @app.task
    async def double(a: int) -> int:
        return 2 * a

    assert await double(4) == 8


async def test_a_plain_function_runs_in_a_thread_that_knows_its_task(app: App) -> None:
    @app.task
    def where(ctx: Context) -> list[str]:
        return [threading.current_thread().name, ctx.task_id]

    handle = await where.enqueue()
    await app.run_worker(until_idle=True)

    name, task_id = await handle.result(5)
    assert name != threading.main_thread().name
    assert task_id == handle.id


async def test_priorities_go_first_and_age(app: App) -> None:
    order: list[str] = []

    @app.task
    async def note(name: str) -> None:
        order.append(name)

    await note.options(priority="low").enqueue("low")
    await note.options(priority="critical").enqueue("critical")
    await note.enqueue("normal")
    await app.run_worker(until_idle=True, concurrency=1)

    assert order == ["critical", "normal", "low"]


async def test_a_worker_serves_only_the_queues_it_was_given(app: App) -> None:
    @app.task
    async def work() -> str:
        return "done"

    mine = await work.options(queue="mail").enqueue()
    other = await work.options(queue="bulk").enqueue()
    await app.run_worker(until_idle=True, queues=["mail"])

    assert (await mine.get()).status is TaskState.COMPLETED
    assert (await other.get()).status is TaskState.PENDING


async def test_a_type_that_no_worker_knows_waits(app: App) -> None:
    @app.task
    async def known() -> None: ...

    handle = await app.enqueue("unknown", {"a": 1})
    await app.run_worker(until_idle=True)

    assert (await handle.get()).status is TaskState.PENDING


async def test_a_delayed_task_starts_on_time(app: App) -> None:
    @app.task
    async def tick() -> None: ...

    async with app.worker():
        handle = await tick.options(delay=0.3).enqueue()
        assert (await handle.get()).status is TaskState.SCHEDULED
        await handle.result(10)

    record = await handle.get()
    assert record.started_at is not None
    late = record.started_at - record.scheduled_for
    assert timedelta(0) <= late < timedelta(seconds=1)


async def test_a_due_task_becomes_ready_on_time_while_every_slot_is_busy(app: App) -> None:
    hold = asyncio.Event()

    @app.task
    async def slow() -> None:
        await hold.wait()

    @app.task
    async def later() -> None: ...

    async with app.worker(concurrency=1):
        first = await slow.enqueue()
        second = await later.options(delay=0.3).enqueue()
        async with asyncio.timeout(2.5):
            while (await second.get()).status is not TaskState.PENDING:
                await asyncio.sleep(0.05)
        hold.set()
        await first.result(10)
        await second.result(10)


async def test_a_coroutine_function_in_a_plain_decorator_is_awaited(app: App) -> None:
    def plainly(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return call

    @app.task
    @plainly
    async def double(n: int) -> int:
        await asyncio.sleep(0)
        return 2 * n

    handle = await double.enqueue(n=21)
    await app.run_worker(until_idle=True)

    assert await handle.result(5) == 42


async def test_middleware_wraps_every_handler_in_order(app: App) -> None:
    calls: list[str] = []

    @app.middleware
    async def outer(ctx: Context, call_next: Any) -> Any:
        calls.append(f"outer {ctx.type}")
        return await call_next()

    @app.middleware
    async def inner(ctx: Context, call_next: Any) -> Any:
        calls.append("inner")
        return f"wrapped {await call_next()}"

    @app.task
    def work() -> str:
        return "value"

    handle = await work.enqueue()
    await app.run_worker(until_idle=True)

    assert await handle.result(5) == "wrapped value"
    assert calls == ["outer work", "inner"]


async def test_hooks_run_in_each_worker_and_their_state_reaches_handlers(app: App) -> None:
    stopped: list[str] = []

    @app.on_startup
    async def start() -> dict[str, int]:
        return {"pool": 7}

    @app.on_startup
    def nothing() -> None: ...

    @app.on_shutdown
    def stop() -> None:
        stopped.append("first")

    @app.on_shutdown
    async def stop_too() -> None:
        stopped.append("second")

    @app.task
    async def work(ctx: Context) -> int:
        return int(ctx.state["pool"])

    handle = await work.enqueue()
    await app.run_worker(until_idle=True)

    assert await handle.result(5) == 7
    assert stopped == ["first", "second"]


async def test_a_set_of_tasks_is_included_and_two_of_one_name_are_refused(app: App) -> None:
    mails = TaskSet()

    @mails.task(name="mail.send")
    async def send(to: str) -> str:
        return to

    with pytest.raises(ConfigurationError, match=r"mail\.send.*include"):
        await send.enqueue("a")
    app.include(mails)
    handle = await send.enqueue("a")
    await app.run_worker(until_idle=True)

    assert await handle.result(5) == "a"
    with pytest.raises(ConfigurationError, match="defined twice"):

        @app.task(name="mail.send")
        async def again() -> None: ...


async def test_no_payload_reaches_the_log(app: App, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    @app.task(retry=1)
    async def leak(secret: str) -> str:
        if secret == "hunter2-fails":
            raise ValueError(secret)
        return secret

    await leak.enqueue("hunter2")
    await leak.enqueue("hunter2-fails")
    await app.run_worker(until_idle=True)

    assert "hunter2" not in caplog.text
