"""What becomes of a task: its result, its errors, its retries and its time limit."""

import asyncio
import threading
from contextlib import suppress
from datetime import timedelta
from typing import cast
from uuid import uuid4

import pytest

from acceptance.quick import QUICK
from windlass import (
    App,
    Context,
    Fail,
    Retry,
    RetryAfter,
    Snooze,
    StoreUnavailable,
    TaskCancelled,
    TaskFailed,
    TaskNotFound,
    TaskState,
)
from windlass.runtime import slots


async def test_a_failing_task_is_retried_and_then_dead_which_is_told(
    app: App, caplog: pytest.LogCaptureFixture
) -> None:
    attempts: list[int] = []

    @app.task(retry=Retry(max_attempts=3, base=0.01, jitter="none"))
    async def broken(ctx: Context) -> None:
        attempts.append(ctx.attempt)
        raise ValueError(f"attempt {ctx.attempt}")

    async with app.worker():
        handle = await broken.enqueue()
        with pytest.raises(TaskFailed, match="attempt 3"):
            await handle.result(10)

    record = await handle.get()
    assert attempts == [1, 2, 3]
    assert record.status is TaskState.DEAD
    assert [error["message"] for error in record.errors] == [
        "attempt 1",
        "attempt 2",
        "attempt 3",
    ]
    assert "Traceback" in record.errors[0]["traceback"]
    assert caplog.text.count(f"task.dead task_id={record.id}") == 1


async def test_fail_ends_a_task_without_another_attempt(app: App) -> None:
    @app.task
    async def stolen() -> None:
        raise Fail("stolen card")

    handle = await stolen.enqueue()
    await app.run_worker(until_idle=True)

    record = await handle.get()
    assert (record.status, record.attempts) == (TaskState.FAILED, 1)
    assert record.last_error == "stolen card"


async def test_a_snooze_uses_no_attempt_and_retry_after_uses_one(app: App) -> None:
    seen: list[int] = []

    @app.task
    async def later(ctx: Context) -> str:
        seen.append(ctx.attempt)
        match len(seen):
            case 1:
                raise Snooze(0.01)
            case 2:
                raise RetryAfter(0.01)
        return "done"

    async with app.worker():
        handle = await later.enqueue()
        assert await handle.result(10) == "done"

    assert seen == [1, 1, 2]


async def test_a_coroutine_that_overruns_is_stopped(app: App) -> None:
    stopped = asyncio.Event()

    @app.task(timeout=0.05, retry=1)
    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    handle = await endless.enqueue()
    await app.run_worker(until_idle=True)

    assert stopped.is_set()
    with pytest.raises(TaskFailed, match=r"took longer than 0\.05 s"):
        await handle.result(5)


async def test_a_thread_that_overruns_gives_its_slot_back(app: App) -> None:
    go_on = threading.Event()

    @app.task(timeout=0.05, retry=1)
    def hung(ctx: Context) -> bool:
        go_on.wait(30)
        return ctx.cancelled

    @app.task
    def quick() -> str:
        return "ran"

    async with app.worker(concurrency=1):
        first = await hung.enqueue()
        with pytest.raises(TaskFailed):
            await first.result(10)
        assert await (await quick.enqueue()).result(10) == "ran"
    go_on.set()
    (error,) = (await first.get()).errors
    assert "go_on.wait(30)" in error["traceback"]  # where it hung


async def test_a_timeout_of_the_handler_s_own_is_not_called_that_of_the_task(app: App) -> None:
    @app.task(timeout=30, retry=1)
    async def inner() -> None:
        async with asyncio.timeout(0.01):
            await asyncio.Event().wait()

    handle = await inner.enqueue()
    await app.run_worker(until_idle=True)

    assert "30 s" not in ((await handle.get()).last_error or "")


async def test_a_result_that_need_not_be_kept_is_not(app: App) -> None:
    @app.task(keep_result=False)
    async def work() -> str:
        return "gone"

    handle = await work.enqueue()
    await app.run_worker(until_idle=True)

    assert await handle.result(5) is None


async def test_a_result_that_json_cannot_carry_fails_the_task(app: App) -> None:
    @app.task
    async def work() -> object:
        return object()

    handle = await work.enqueue()
    await app.run_worker(until_idle=True)

    record = await handle.get()
    assert record.status is TaskState.FAILED
    assert "result of task 'work'" in (record.last_error or "")


async def test_a_result_may_be_waited_for_in_vain(app: App) -> None:
    @app.task
    async def work() -> None: ...

    handle = await work.enqueue()

    with pytest.raises(TimeoutError):
        await handle.result(0.05)
    with pytest.raises(TaskNotFound):
        await app.handle("01890000-0000-7000-8000-000000000000").result(5)
    with pytest.raises(TaskNotFound, match="not the id"):
        app.handle("nonsense")


@pytest.mark.parametrize(
    "error",
    [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError(), ValueError("nul \x00 \ud800")],
)
async def test_whatever_a_handler_raises_the_worker_lives(app: App, error: BaseException) -> None:
    @app.task(retry=1)
    async def wild() -> None:
        raise error

    @app.task
    async def tame() -> str:
        return "fine"

    first, second = await wild.enqueue(), await tame.enqueue()
    await app.run_worker(until_idle=True, concurrency=1)

    assert (await first.get()).status is TaskState.DEAD
    assert await second.result(5) == "fine"


def test_a_thread_that_raises_stop_iteration_fails_its_task() -> None:
    async def run() -> None:
        async with App("memory:", **QUICK) as app:

            @app.task(retry=1)
            def empty() -> str:
                return next(iter([]))

            handle = await empty.enqueue()
            async with asyncio.timeout(10):
                await app.run_worker(until_idle=True)
            assert "StopIteration" in str((await handle.get()).last_error)

    asyncio.run(run())


async def test_a_payload_that_does_not_fit_the_handler_fails_for_good(app: App) -> None:
    store = await app.store()
    handle = await app.enqueue("strict", {"width": "wide"})

    @app.task
    async def strict(width: int) -> None: ...

    await app.run_worker(until_idle=True)

    record = await handle.get()
    assert record.status is TaskState.FAILED
    assert "strict" in (record.last_error or "")
    assert record.attempts == 1
    del store


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "GIVE_WAY_WITHIN", 0.2)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("by", ["timeout", "cancel"])
async def test_a_coroutine_that_does_not_give_way_frees_its_slot(app: App, by: str) -> None:
    begun = asyncio.Event()
    let_go = asyncio.Event()

    @app.task(timeout=0.05 if by == "timeout" else 60, retry=1)
    async def stubborn() -> str:
        begun.set()
        while not let_go.is_set():
            with suppress(asyncio.CancelledError):
                await let_go.wait()
        return "too late"

    @app.task
    async def quick() -> str:
        return "ran"

    async with app.worker(concurrency=1):
        first = await stubborn.enqueue()
        await asyncio.wait_for(begun.wait(), 10)
        if by == "cancel":
            await first.cancel("enough")
            with pytest.raises(TaskCancelled):
                await first.result(10)
        else:
            with pytest.raises(TaskFailed, match="did not give way"):
                await first.result(10)
        assert await (await quick.enqueue()).result(10) == "ran"
        let_go.set()

    record = await first.get()
    assert record.status is (TaskState.CANCELLED if by == "cancel" else TaskState.DEAD)


async def test_a_coroutine_that_catches_its_timeout_and_returns_has_failed(app: App) -> None:
    @app.task(timeout=0.05, retry=1)
    async def late() -> str:
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return "all the same"

    handle = await late.enqueue()
    await app.run_worker(until_idle=True)

    with pytest.raises(TaskFailed, match=r"took longer than 0\.05 s"):
        await handle.result(5)


class Unprintable:
    def __str__(self) -> str:
        raise LookupError("no text")


@pytest.mark.parametrize(
    ("error", "said", "error_class"),
    [
        (AssertionError(), "AssertionError", "code-bug"),
        (ValueError(), "ValueError", "unknown"),
        (Snooze(-1), "Snooze -1: use a finite number of seconds", "code-bug"),
        (RetryAfter(-5), "RetryAfter -5: use a finite number of seconds", "code-bug"),
        (RetryAfter(cast("float", "soon")), "RetryAfter 'soon': use seconds", "code-bug"),
        (RetryAfter(0, ValueError("rate limit")), "rate limit", "rate-limited"),
        (Fail(Unprintable()), "<its text raised LookupError>", "permanent-input"),
    ],
)
async def test_what_is_kept_of_an_odd_error_says_what_it_was(
    app: App, error: Exception, said: str, error_class: str
) -> None:
    @app.task(retry=1)
    async def odd() -> None:
        raise error

    handle = await odd.enqueue()
    await app.run_worker(until_idle=True)

    record = await handle.get()
    assert record.last_error is not None
    assert record.last_error.startswith(said)
    assert record.error_class == error_class
    fails_at_once = error_class in ("code-bug", "permanent-input")
    assert record.status is (TaskState.FAILED if fails_at_once else TaskState.DEAD)


@pytest.mark.parametrize("steer", [Snooze, RetryAfter])
async def test_a_task_is_put_off_by_a_timedelta_as_well(app: App, steer: type[Snooze]) -> None:
    @app.task(retry=3)
    async def later() -> None:
        raise steer(timedelta(hours=1))

    handle = await later.enqueue()
    await app.run_worker(until_idle=True)

    record = await handle.get()
    assert record.status is TaskState.SCHEDULED
    assert record.scheduled_for - record.created_at > timedelta(minutes=59)


async def test_a_result_is_looked_for_however_short_the_limit(app: App) -> None:
    @app.task
    async def quick() -> str:
        return "done"

    ended, waiting = await quick.enqueue(), await quick.options(delay=60).enqueue()
    await app.run_worker(until_idle=True)

    assert await ended.result(timeout=0) == "done"
    with pytest.raises(TimeoutError, match="has not ended within 0 s"):
        await waiting.result(timeout=0)
    with pytest.raises(TaskNotFound):
        await app.handle(uuid4()).result(timeout=0)


async def test_a_short_wait_for_a_result_ends_in_time_while_the_store_is_away(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def gone(_: object) -> None:
        raise StoreUnavailable("gone")

    handle = await app.enqueue("work", {})
    monkeypatch.setattr(await app.store(), "ended", gone)

    with pytest.raises(TimeoutError, match="has not ended within 0 s"):
        await handle.result(timeout=0)


@pytest.mark.parametrize("keep_result", [True, False])
async def test_a_generator_that_a_plain_function_returns_is_a_value_like_any_other(
    app: App, keep_result: bool
) -> None:
    @app.task(keep_result=keep_result)
    def numbers() -> object:
        return (n for n in range(3))

    handle = await numbers.enqueue()
    await app.run_worker(until_idle=True)

    expected = TaskState.FAILED if keep_result else TaskState.COMPLETED
    assert (await handle.get()).status is expected
