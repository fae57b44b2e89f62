"""Handlers that end without waiting share a task of asyncio, and none of them can tell."""

import asyncio
import contextvars
import weakref
from collections.abc import AsyncIterator
from typing import Any

import pytest

from windlass import App, TaskState

WITHIN = 30.0  # seconds
MANY = 200

seen: contextvars.ContextVar[int | None] = contextvars.ContextVar("seen", default=None)


@pytest.fixture
async def app() -> AsyncIterator[App]:
    async with App("memory:") as app:
        yield app


async def run_all(app: App, concurrency: int = 20) -> None:
    async with asyncio.timeout(WITHIN):
        await app.run_worker(concurrency=concurrency, until_idle=True)


def task_here() -> "asyncio.Task[Any]":
    task = asyncio.current_task()
    assert task is not None
    return task


async def test_many_of_them_take_few_tasks(app: App) -> None:
    made = 0
    loop = asyncio.get_running_loop()

    def count(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> Any:
        nonlocal made
        made += 1
        return asyncio.Task(coro, loop=loop, **options)

    ran = 0

    @app.task
    async def work(n: int) -> None:
        nonlocal ran
        ran += 1

    await app.enqueue_many([work.call(n) for n in range(MANY * 10)])
    loop.set_task_factory(count)
    try:
        await run_all(app)
    finally:
        loop.set_task_factory(None)

    assert ran == MANY * 10
    assert made < MANY * 2


async def test_each_has_context_variables_of_its_own(app: App) -> None:
    found: list[int | None] = []

    @app.task
    async def work(n: int) -> None:
        found.append(seen.get())
        seen.set(n)

    await app.enqueue_many([work.call(n) for n in range(MANY)])
    await run_all(app)

    assert found == [None] * MANY


async def test_a_task_that_somebody_has_kept_is_not_used_again(app: App) -> None:
    kept: list[asyncio.Task[Any]] = []

    @app.task
    async def work(n: int) -> None:
        kept.append(task_here())

    await app.enqueue_many([work.call(n) for n in range(MANY)])
    await run_all(app)

    assert len({id(task) for task in kept}) == MANY


async def test_what_is_kept_by_task_is_not_shared(app: App) -> None:
    by_task: weakref.WeakKeyDictionary[asyncio.Task[Any], int] = weakref.WeakKeyDictionary()
    shared: list[int] = []

    @app.task
    async def work(n: int) -> None:
        if task_here() in by_task:
            shared.append(n)
        by_task[task_here()] = n

    await app.enqueue_many([work.call(n) for n in range(MANY)])
    await run_all(app)

    assert shared == []


async def test_a_name_is_given_to_one_task_alone(app: App) -> None:
    names: list[str] = []

    @app.task
    async def work(n: int) -> None:
        names.append(task_here().get_name())
        task_here().set_name("mine")

    await app.enqueue_many([work.call(n) for n in range(MANY)])
    await run_all(app)

    assert "mine" not in names


async def test_one_that_cancels_itself_and_returns_cancels_no_other(app: App) -> None:
    ran: list[int] = []

    @app.task
    async def work(n: int) -> None:
        ran.append(n)
        if n % 10 == 0:
            task_here().cancel()

    handles = await app.enqueue_many([work.call(n) for n in range(MANY)])
    await run_all(app)

    assert sorted(ran) == list(range(MANY))
    assert {(await handle.get()).status for handle in handles} == {TaskState.COMPLETED}


async def test_one_that_waits_holds_up_no_other(app: App) -> None:
    let_go = asyncio.Event()
    ran: list[int] = []

    @app.task
    async def work(n: int) -> None:
        if n == MANY // 2:
            await let_go.wait()
        ran.append(n)
        if len(ran) == MANY - 1:
            let_go.set()

    await app.enqueue_many([work.call(n) for n in range(MANY)])
    await run_all(app, concurrency=2)

    assert sorted(ran) == list(range(MANY))
    assert ran[-1] == MANY // 2


async def test_one_that_waits_is_the_same_task_before_and_after(app: App) -> None:
    found: list[tuple[bool, int | None]] = []

    @app.task
    async def work(n: int) -> None:
        before = task_here()
        seen.set(n)
        if n % 10 == 5:
            async with asyncio.timeout(WITHIN), asyncio.TaskGroup() as group:
                group.create_task(asyncio.sleep(0))
        found.append((task_here() is before, seen.get()))

    await app.enqueue_many([work.call(n) for n in range(MANY)])
    await run_all(app)

    assert sorted(found) == [(True, n) for n in range(MANY)]


async def test_a_timeout_reaches_one_that_begins_to_wait(app: App) -> None:
    ran: list[int] = []

    @app.task(timeout=0.05, retry=1)
    async def work(n: int) -> None:
        if n == MANY // 2:
            await asyncio.Event().wait()
        ran.append(n)

    handles = await app.enqueue_many([work.call(n) for n in range(MANY)])
    await run_all(app)

    assert sorted(ran) == [n for n in range(MANY) if n != MANY // 2]
    late = await handles[MANY // 2].get()
    assert (late.status, late.last_error) == (TaskState.DEAD, "took longer than 0.05 s")


async def test_what_one_starts_beside_itself_enqueues_in_its_name(app: App) -> None:
    """Whoever goes on after the end of a handler may not enqueue under the lease of another."""
    refused: list[str] = []
    beside: set[asyncio.Task[None]] = set()

    @app.task
    async def after(n: int) -> None: ...

    @app.task
    async def work(n: int) -> None:
        async def go_on() -> None:
            await asyncio.sleep(0.01)
            try:
                await after.enqueue(n)
            except Exception as error:
                refused.append(type(error).__name__)

        beside.add(asyncio.create_task(go_on()))

    await app.enqueue_many([work.call(n) for n in range(50)])
    await run_all(app)
    await asyncio.gather(*beside)

    assert refused == ["LeaseLost"] * 50
