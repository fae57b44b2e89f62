"""The hook for tasks that failed for good: told after the fact, whatever it does."""

import asyncio
import threading
from datetime import timedelta
from uuid import uuid4

import pytest

from windlass import (
    App,
    ConfigurationError,
    Fail,
    Retry,
    TaskFailed,
    TaskRecord,
)
from windlass.model.task import ClaimRequest, Started


async def test_the_hook_is_told_of_each_task_that_failed_for_good(app: App) -> None:
    told: list[TaskRecord] = []
    all_told = asyncio.Event()

    @app.on_dead
    async def alarm(task: TaskRecord) -> None:
        told.append(task)
        if len(told) == 4:
            all_told.set()

    @app.task(retry=Retry(max_attempts=2, base=0.01, jitter="none"))
    async def work(how: str) -> None:
        match how:
            case "fail":
                raise Fail("no")
            case "bug":
                raise KeyError("x")
            case "die":
                raise ConnectionError("away")

    @app.task(retry=Retry(max_attempts=5, base=60, jitter="none", max_age=1))
    async def old() -> None:
        raise ConnectionError("too late")

    async with app.worker():
        for how in ("", "fail", "bug", "die"):
            await work.enqueue(how)
        await old.enqueue()
        await asyncio.wait_for(all_told.wait(), 20)

    assert sorted((task.type, task.status, task.error_class) for task in told) == [
        ("old", "dead", "transient"),
        ("work", "dead", "transient"),
        ("work", "failed", "code-bug"),
        ("work", "failed", "permanent-input"),
    ]


async def test_a_plain_hook_runs_in_a_thread_and_does_not_stop_the_worker(app: App) -> None:
    threads = set[int]()
    done = threading.Event()

    @app.on_dead
    def alarm(task: TaskRecord) -> None:
        threads.add(threading.get_ident())
        done.wait(10)

    @app.task
    async def work(how: str) -> None:
        if how:
            raise Fail(how)

    async with app.worker():
        failed = await work.enqueue("no")
        with pytest.raises(TaskFailed):
            await failed.result(10)
        await (await work.enqueue("")).result(10)  # while the hook still runs
        done.set()

    assert threads
    assert threading.get_ident() not in threads


async def test_a_hook_that_fails_changes_nothing(
    app: App, caplog: pytest.LogCaptureFixture
) -> None:
    told = asyncio.Event()

    @app.on_dead
    async def broken(task: TaskRecord) -> None:
        raise RuntimeError("no alarm today")

    @app.on_dead
    async def alarm(task: TaskRecord) -> None:
        told.set()

    @app.task
    async def work() -> None:
        raise Fail("no")

    handle = await work.enqueue()
    async with app.worker():
        await asyncio.wait_for(told.wait(), 10)

    assert (await handle.get()).status == "failed"
    assert "alarm.failed" in caplog.text


async def test_a_task_that_died_with_its_worker_is_told_by_the_leader(app: App) -> None:
    told: asyncio.Future[TaskRecord] = asyncio.get_running_loop().create_future()

    @app.on_dead
    async def alarm(task: TaskRecord) -> None:
        told.set_result(task)

    @app.task(retry=1)
    async def work() -> None: ...

    await work.enqueue()
    store = await app.store()
    lease = timedelta(seconds=0.5)
    claim = (await store.claim(ClaimRequest(uuid4(), ("work",), 1, lease, lease))).claim
    assert claim is not None
    (task,) = claim.tasks
    await store.start([Started(claim.token, task.id, task.generation, 0.0)])  # and never again

    async with app.worker():
        record = await asyncio.wait_for(told, 20)

    assert (record.id, record.status) == (str(task.id), "dead")
    assert record.errors[-1]["type"] == "WorkerLost"


def test_a_hook_of_another_shape_is_refused() -> None:
    app = App("memory:")

    with pytest.raises(ConfigurationError, match="hook for dead tasks"):
        app.on_dead(lambda: None)  # type: ignore[type-var]  # on purpose
