"""What a short task costs, counted and not timed: statements, and calls of Python."""

import asyncio
import gc
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from uuid import uuid4

import pytest

from windlass import App, runtime
from windlass.model.task import Enqueued
from windlass.runtime import carrier
from windlass.store.postgres.statements import Statements

TASKS = 2000
BATCH = 500
WITHIN = 60.0  # seconds
RUNTIME = str(Path(runtime.__file__).parent)
WINDLASS = str(Path(runtime.__file__).parent.parent)


async def drain(app: App) -> None:
    @app.task
    async def work(n: int) -> None: ...

    await app.enqueue_many([work.call(n) for n in range(TASKS)])
    async with asyncio.timeout(WITHIN):
        await app.run_worker(concurrency=BATCH, until_idle=True)


async def test_a_drain_takes_few_statements(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    fetch = Statements.fetch

    async def counted(run: Statements, name: str, *arguments: Any, **options: Any) -> Any:
        asked.append(name)
        return await fetch(run, name, *arguments, **options)

    monkeypatch.setattr(Statements, "fetch", counted)
    async with App(database_url) as app:
        await drain(app)

    assert asked.count("claim_tasks") + asked.count("settle_tasks") <= 0.02 * TASKS


async def test_a_task_takes_few_calls_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    # To count takes time, and the more the event loop turns meanwhile the more there is to count.
    monkeypatch.setattr(carrier, "SLICE", WITHIN)
    async with App("memory:") as app:

        @app.task
        async def work(n: int) -> None: ...

        await app.enqueue_many([work.call(n) for n in range(TASKS)])
        with counting_calls(RUNTIME) as calls:
            await app.run_worker(concurrency=BATCH, until_idle=True)

    assert sum(calls.values()) / TASKS < 37, calls.most_common(50)


async def test_a_task_that_waits_takes_few_calls_of_python() -> None:
    async with App("memory:") as app:

        @app.task
        async def work(n: int) -> None:
            await asyncio.sleep(0.001)

        await app.enqueue_many([work.call(n) for n in range(TASKS)])
        with counting_calls(RUNTIME) as calls:
            await app.run_worker(concurrency=BATCH, until_idle=True)

    assert sum(calls.values()) / TASKS < 40, calls.most_common(50)


async def test_a_task_that_waits_is_little_work_for_the_collector() -> None:
    let_go, held = asyncio.Event(), []
    async with App("memory:") as app:

        @app.task
        async def work(n: int) -> None:
            if n == BATCH - 1:
                held.append(len(gc.get_objects()))
                let_go.set()
            await let_go.wait()

        await app.enqueue_many([work.call(n) for n in range(BATCH)])
        gc.collect()
        before = len(gc.get_objects())
        await app.run_worker(concurrency=BATCH, until_idle=True)

    assert (held[0] - before) / BATCH < 18


async def test_a_task_of_many_is_enqueued_with_few_calls_of_python(database_url: str) -> None:
    async with App(database_url) as app:

        @app.task
        async def work(n: int) -> None: ...

        with counting_calls(WINDLASS) as calls:
            await app.enqueue_many([work.call(n=n) for n in range(TASKS)])

    assert sum(calls.values()) / TASKS < 18, calls.most_common(50)


async def test_the_collector_looks_at_neither_calls_nor_handles() -> None:
    async with App("memory:") as app:

        @app.task
        async def work(n: int) -> None: ...

        assert not gc.is_tracked(work.call(n=1))
        assert not gc.is_tracked(work.options(priority=3).call(n=1).options)
        handle = await work.enqueue(1)
        assert not gc.is_tracked(handle)
        assert not gc.is_tracked(Enqueued(uuid4(), created=True))

        handles = {handle, await work.enqueue(1)}
        assert len(handles) == 2  # two are never equal


@contextmanager
def counting_calls(folder: str) -> Iterator[Counter[str]]:
    """Count the calls that code of a folder is and makes: of its functions, and of what is built in."""
    counts: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event in {"call", "c_call"} and folder in frame.f_code.co_filename:
            counts[f"{event} {frame.f_code.co_qualname}"] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        yield counts
    finally:
        sys.setprofile(before)
