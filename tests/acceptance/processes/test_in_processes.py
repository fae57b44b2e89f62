"""What runs in a process ends as it does anywhere else, and costs the worker nothing."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from acceptance.processes import handlers
from acceptance.processes.looking import WITHIN, is_alive, noted, until
from acceptance.quick import QUICK
from windlass import App, ConfigurationError, Context, Retry, TaskCancelled, TaskFailed, TaskState
from windlass.context import current_job
from windlass.runtime import executor
from windlass.runtime.job import Job
from windlass.runtime.processes.messages import Died, Run
from windlass.runtime.processes.pool import Running

ONE: dict[str, Any] = {**QUICK, "processes": 1}
AT_ONCE = Retry(max_attempts=2, base=0, jitter="none")


async def test_plain_functions_and_coroutines_run_in_processes(app_url: str) -> None:
    async with App(app_url, **ONE) as app:
        square = app.task(run="process")(handlers.square)
        later = app.task(run="process", name="later")(handlers.square_later)
        cube = app.task(run="process")(handlers.Kept.cube)

        @app.on_startup
        def start() -> str:
            return "only here"

        async with app.worker() as worker, asyncio.timeout(WITHIN):
            handles = [await task.enqueue(n=3) for task in (square, cube, later)]
            nine, cubed, told = [await handle.result() for handle in handles]

        assert (nine, cubed) == (9, 27)
        me = str(worker._options.info.id)
        assert told == {"square": 9, "worker": me, "state": None}


async def test_a_process_that_dies_costs_an_attempt_and_the_worker_lives(app_url: str) -> None:
    async with App(app_url, **ONE) as app:
        task = app.task(run="process", retry=AT_ONCE)(handlers.die_at_first)
        async with app.worker(), asyncio.timeout(WITHIN):
            handle = await task.enqueue()
            assert await handle.result() == "survived"

        record = await handle.get()
        (error,) = record.errors
        assert error["type"] == "ProcessDied"
        assert error["message"] == "its process ended with exit code 3"


async def test_what_overruns_is_killed_and_fails_as_anything_else_does(
    app_url: str, tmp_path: Path
) -> None:
    async with App(app_url, **ONE) as app:
        hang = app.task(run="process", retry=1, timeout=0.5)(handlers.hang)
        note = app.task(run="process")(handlers.note)
        async with app.worker(), asyncio.timeout(WITHIN):
            handle = await hang.enqueue(str(tmp_path / "hung"))
            pid = await noted(tmp_path / "hung")
            await until(lambda: not is_alive(pid))
            other = await (await note.enqueue(str(tmp_path / "next"))).result()

        record = await handle.get()
        assert record.status is TaskState.DEAD
        assert record.errors[0]["type"] == "TimeoutError"
        assert record.last_error == "took longer than 0.5 s"
        assert other != pid


async def test_time_spent_waiting_for_a_process_is_not_counted(
    app_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[asyncio.Timeout] = []
    set_meanwhile: list[float | None] = []
    within = executor._within

    async def seen(seconds: float, call: Awaitable[Any], limit: asyncio.Timeout) -> Any:
        limits.append(limit)
        return await within(seconds, call, limit)

    monkeypatch.setattr(executor, "_within", seen)
    async with App(app_url, **ONE) as app:
        note = app.task(run="process", timeout=100)(handlers.note)
        worker = await app.new_worker()
        pool: Any = worker._processes
        begin = pool.begin

        async def begin_later(run: Any) -> Any:
            await asyncio.sleep(0)
            set_meanwhile.append(limits[0].when())
            return await begin(run)

        pool.begin = begin_later
        handle = await note.enqueue(str(tmp_path / "noted"))
        async with asyncio.timeout(WITHIN):
            await worker.run(until_idle=True)

        assert (await handle.get()).status is TaskState.COMPLETED
        assert set_meanwhile == [None]
        assert limits[0].when() is not None


@pytest.mark.parametrize(
    ("how", "status", "attempts"),
    [
        ("retry", TaskState.COMPLETED, 2),
        ("snooze", TaskState.SCHEDULED, 0),
        ("fail", TaskState.FAILED, 1),
    ],
)
async def test_steering_has_the_same_effect(
    app_url: str, how: str, status: TaskState, attempts: int
) -> None:
    async with App(app_url, **ONE) as app:
        task = app.task(run="process")(handlers.steer)
        handle = await task.enqueue(how)
        async with app.worker(), asyncio.timeout(WITHIN):
            while (record := await handle.get()).status is not status:
                await asyncio.sleep(0.02)

        assert record.attempts == attempts


async def test_errors_of_processes_are_classified_by_the_rules_of_the_worker(app_url: str) -> None:
    async with App(app_url, **ONE) as app:
        be_odd = app.task(run="process", retry=AT_ONCE)(handlers.be_odd)
        app.error_rule("permanent-input", type=handlers.OddError, attribute={"code": 7})
        app.error_rule("transient", type=handlers.OddError, attribute={"far": 1})
        app.error_rule("rate-limited", type=handlers.OddError)
        async with asyncio.timeout(WITHIN):
            handles = [await be_odd.enqueue(code) for code in (7, 8)]
            await app.run_worker(until_idle=True)

        input_, limited = [await handle.get() for handle in handles]
        assert (input_.status, input_.attempts) == (TaskState.FAILED, 1)
        assert input_.errors[0]["class"] == "permanent-input"
        assert input_.errors[0]["message"] == "odd?: 7"
        assert "in be_odd" in input_.errors[0]["traceback"]
        assert limited.errors[0]["class"] == "rate-limited"


@pytest.mark.parametrize("handler", [handlers.give_way, handlers.hang])
async def test_what_is_cancelled_gives_way_or_is_killed(
    app_url: str, tmp_path: Path, handler: Callable[..., Any]
) -> None:
    async with App(app_url, **ONE) as app:
        task = app.task(run="process", name="cancelled")(handler)
        note = app.task(run="process")(handlers.note)
        async with app.worker(), asyncio.timeout(WITHIN):
            handle = await task.enqueue(noted=str(tmp_path / "noted"))
            pid = await noted(tmp_path / "noted")
            await handle.cancel("no longer needed")
            with pytest.raises(TaskCancelled, match="no longer needed"):
                await handle.result()
            other = await (await note.enqueue(str(tmp_path / "next"))).result()

        assert (other == pid) is (handler is handlers.give_way)


async def test_what_lost_its_lease_is_killed_and_nothing_of_it_is_written(
    app_url: str, tmp_path: Path
) -> None:
    async with App(app_url, **ONE) as app:
        task = app.task(run="process")(handlers.give_way)  # if it were told, it would return
        async with app.worker(shutdown_timeout=0) as worker, asyncio.timeout(WITHIN):
            handle = await task.enqueue(noted=str(tmp_path / "noted"))
            pid = await noted(tmp_path / "noted")
            worker._claims_lost(list(worker._slots._outstanding))
            await until(lambda: not is_alive(pid))
            worker.stop()

        assert (await handle.get()).status is not TaskState.COMPLETED


async def test_a_drain_waits_and_then_kills_and_gives_back(app_url: str, tmp_path: Path) -> None:
    async with App(app_url, **ONE) as app:
        wait_for = app.task(run="process")(handlers.wait_for)
        async with app.worker() as worker:
            handle = await wait_for.enqueue(str(tmp_path / "noted"), str(tmp_path / "let go"))
            await noted(tmp_path / "noted")

            async def let_go() -> None:
                await until(lambda: worker._stopping)
                (tmp_path / "let go").touch()

            letting_go = asyncio.create_task(let_go())
        await letting_go
        assert (await handle.get()).status is TaskState.COMPLETED

        hang = app.task(run="process")(handlers.hang)
        async with app.worker(shutdown_timeout=0.05), asyncio.timeout(WITHIN):
            handle = await hang.enqueue(str(tmp_path / "hung"))
            pid = await noted(tmp_path / "hung")

        assert not is_alive(pid)
        record = await handle.get()
        assert (record.status, record.attempts, record.generation) == (TaskState.PENDING, 0, 2)


async def test_middleware_runs_in_the_worker_around_the_process(app_url: str) -> None:
    seen: list[Any] = []
    async with App(app_url, **ONE) as app:
        square = app.task(run="process")(handlers.square)
        dies = app.task(run="process", retry=1)(handlers.die_at_first)

        @app.middleware
        async def look(ctx: Context, call_next: Callable[[], Awaitable[Any]]) -> Any:
            try:
                value = await call_next()
            except Exception as error:
                seen.append(str(error))
                raise
            seen.append((os.getpid(), value))
            return value + 1

        async with asyncio.timeout(WITHIN):
            handles = [await square.enqueue(3), await dies.enqueue()]
            await app.run_worker(until_idle=True)

        assert seen[0] == (os.getpid(), 9)
        assert await handles[0].result() == 10
        assert seen[1] == "its process ended with exit code 3"
        assert (await handles[1].get()).errors[0]["type"] == "ProcessDied"


@pytest.mark.parametrize("hangs", ["before", "after", "again"])
async def test_middleware_around_a_process_has_no_more_time_than_its_task(
    app_url: str, tmp_path: Path, hangs: str
) -> None:
    async with App(app_url, **ONE) as app:
        note = app.task(run="process", retry=1, timeout=0.5)(handlers.note)

        @app.middleware
        async def hang(ctx: Context, call_next: Callable[[], Awaitable[Any]]) -> Any:
            if hangs == "after":
                await call_next()
            try:
                await asyncio.sleep(WITHIN)
            except asyncio.CancelledError:
                if hangs != "again":
                    raise
            return await call_next()

        async with asyncio.timeout(WITHIN / 2):
            handle = await note.enqueue(str(tmp_path / "noted"))
            await app.run_worker(until_idle=True)

        (error,) = (await handle.get()).errors
        assert (error["type"], error["message"]) == ("TimeoutError", "took longer than 0.5 s")
        assert (tmp_path / "noted").exists() == (hangs == "after")


async def test_what_middleware_has_used_is_not_left_for_the_process(
    app_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    used, told, limits = 0.3, [], []
    async with App(app_url, **ONE) as app:
        square = app.task(run="process", retry=1, timeout=30)(handlers.square)

        @app.middleware
        async def take_time(ctx: Context, call_next: Callable[[], Awaitable[Any]]) -> Any:
            began = time.monotonic()
            while time.monotonic() < began + used:
                await asyncio.sleep(0.01)
            value = await call_next()
            _, job = current_job.get() or (None, None)
            assert isinstance(job, Job)
            assert job.give_way_at is not None
            limits.append(job.give_way_at - time.monotonic())
            return value

        async with app.worker() as worker, asyncio.timeout(WITHIN):
            pool = worker._processes
            assert pool is not None
            begin = pool.begin

            async def look(run: Run) -> Running | Died:
                told.append(run.timeout)
                return await begin(run)

            monkeypatch.setattr(pool, "begin", look)
            assert await (await square.enqueue(3)).result() == 9

    assert told[0] is not None
    assert max(told[0], limits[0]) <= 30 - used


async def test_middleware_may_call_a_process_again(app_url: str) -> None:
    async with App(app_url, **ONE) as app:
        square = app.task(run="process", retry=1, timeout=30)(handlers.square)

        @app.middleware
        async def twice(ctx: Context, call_next: Callable[[], Awaitable[Any]]) -> Any:
            return [await call_next(), await call_next()]

        async with app.worker(), asyncio.timeout(WITHIN):
            assert await (await square.enqueue(3)).result() == [9, 9]


async def test_middleware_that_waited_for_a_process_in_vain_has_its_time_again(
    app_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with App(app_url, **ONE) as app:
        square = app.task(run="process", retry=1, timeout=0.5)(handlers.square)

        @app.middleware
        async def hang(ctx: Context, call_next: Callable[[], Awaitable[Any]]) -> Any:
            try:
                return await call_next()
            except Exception:
                await asyncio.sleep(WITHIN)

        async with app.worker() as worker, asyncio.timeout(WITHIN / 2):
            assert worker._processes is not None

            async def begin(run: Run) -> Running | Died:
                return Died("is not there")

            monkeypatch.setattr(worker._processes, "begin", begin)
            with pytest.raises(TaskFailed, match=r"took longer than 0\.5 s"):
                await (await square.enqueue(3)).result()


async def test_a_handler_that_forks_costs_no_process_of_its_worker(
    app_url: str, tmp_path: Path
) -> None:
    async with App(app_url, **ONE) as app:
        wait = app.task(run="process", retry=1)(handlers.wait_for)
        async with app.worker() as worker, asyncio.timeout(WITHIN):
            handle = await wait.enqueue(str(tmp_path / "noted"), str(tmp_path / "let_go"))
            await noted(tmp_path / "noted")
            pool = worker._processes
            assert pool is not None
            fork = os.fork()
            if fork == 0:  # what the copy does when it exits
                pool.kill()
                os._exit(0)
            assert await asyncio.to_thread(os.waitpid, fork, 0) == (fork, 0)
            (tmp_path / "let_go").touch()
            assert await handle.result()


async def test_a_task_that_waits_for_a_process_uses_none_of_its_time(
    app_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with App(app_url, **ONE) as app:
        square = app.task(run="process", retry=1, timeout=1)(handlers.square)
        async with app.worker() as worker, asyncio.timeout(WITHIN):
            pool = worker._processes
            assert pool is not None
            begin, waits = pool.begin, asyncio.Event()

            async def begin_late(run: Run) -> Running | Died:
                waits.set()
                await asyncio.sleep(1.5)  # longer than its time, while there is no process
                return await begin(run)

            monkeypatch.setattr(pool, "begin", begin_late)
            handle = await square.enqueue(3)
            await waits.wait()
            (job,) = worker._slots.running()
            assert job.is_waiting
            assert job.give_way_at is None

            assert await handle.result() == 9


async def test_a_function_that_no_process_would_find_is_refused_when_a_worker_starts() -> None:
    app = App("memory:")

    @app.task(run="process")
    def inside() -> None: ...

    with pytest.raises(ConfigurationError, match=r"task 'inside'.*at the top of a module"):
        await app.run_worker(until_idle=True)

    app = App("memory:")
    app.task(run="process", name="short")(lambda: None)
    with pytest.raises(ConfigurationError, match=r"task 'short'.*at the top of a module"):
        await app.run_worker(until_idle=True)


async def test_a_function_whose_name_is_somebody_elses_is_refused_when_a_worker_starts() -> None:
    def square(n: int) -> int:
        return n

    square.__module__, square.__qualname__ = handlers.__name__, "square"
    app = App("memory:")
    app.task(run="process")(square)

    with pytest.raises(ConfigurationError, match=r"handlers\.square is something else"):
        await app.run_worker(until_idle=True)
