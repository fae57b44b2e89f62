"""What a user sees of a worker, on both stores."""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from windlass import (
    App,
    ConfigurationError,
    Context,
    Fail,
    IdempotencyConflict,
    LeaseLost,
    PayloadError,
    Retry,
    RetryAfter,
    Snooze,
    TaskCancelled,
    TaskFailed,
    TaskNotFound,
    TaskSet,
    TaskState,
    WrongState,
)

QUICK: dict[str, Any] = {"lease": 2, "heartbeat": 0.5, "sweep": 0.2, "leader_term": 1.5}


@pytest.fixture(params=["memory", "postgres"])
def app_url(request: pytest.FixtureRequest) -> str:
    return "memory:" if request.param == "memory" else request.getfixturevalue("database_url")


@pytest.fixture
async def app(app_url: str) -> AsyncIterator[App]:
    async with App(app_url, **QUICK) as app:
        yield app


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


async def test_a_failing_task_is_retried_and_then_dead(app: App) -> None:
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


async def test_a_time_in_the_past_means_now(app: App) -> None:
    @app.task
    async def tick() -> None: ...

    handle = await tick.options(at=datetime.now(UTC) - timedelta(days=1)).enqueue()

    assert (await handle.get()).status is TaskState.PENDING


async def test_enqueue_by_name_uses_the_defaults_that_a_worker_registered(app: App) -> None:
    @app.task(name="mail.send", queue="mail", priority="high", retry=7)
    async def send(to: str) -> str:
        return to

    await app.run_worker(until_idle=True)
    producer = App(app.url, **QUICK)
    if app.url == "memory:":
        producer = app
    async with producer:
        handle = await producer.enqueue("mail.send", {"to": "a@example.com"})
        record = await handle.get()

    assert (record.queue, record.priority, record.max_attempts) == ("mail", 20, 7)


async def test_the_same_key_gives_the_first_task(app: App) -> None:
    @app.task
    async def pay(order: int) -> None: ...

    first = await pay.options(idempotency_key="o-1").enqueue(1)
    second = await pay.options(idempotency_key="o-1").enqueue(1)

    assert (second.id, first.created, second.created) == (first.id, True, False)
    with pytest.raises(IdempotencyConflict, match="o-1"):
        await pay.options(idempotency_key="o-1").enqueue(2)


async def test_a_bad_item_among_many_is_named_and_nothing_is_written(app: App) -> None:
    @app.task
    async def resize(width: int) -> None: ...

    calls = [resize.call(1), resize.call("wide"), resize.call(3)]  # type: ignore[arg-type]  # on purpose

    with pytest.raises(PayloadError, match="item 1"):
        await app.enqueue_many(calls)

    assert await (await app.store()).queues() == []


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


async def test_a_handler_may_enqueue_and_its_fence_goes_with_it(app: App) -> None:
    @app.task
    async def child() -> str:
        return "child"

    @app.task
    async def parent() -> str:
        return (await child.enqueue()).id

    handle = await parent.enqueue()
    await app.run_worker(until_idle=True)

    assert await app.handle(await handle.result(5)).result(5) == "child"


async def test_a_handler_that_lost_its_lease_enqueues_and_settles_nothing(app: App) -> None:
    lost: list[type[Exception]] = []
    runs = 0

    @app.task
    async def child() -> None: ...

    @app.task
    async def zombie(ctx: Context) -> str:
        nonlocal runs
        runs += 1
        if runs == 1:
            store = await app.store()
            await _expire_claims(app)
            await store.rescue(10)
            try:
                await child.enqueue()
            except LeaseLost as error:
                lost.append(type(error))
            await child.options(detached=True).enqueue()
            return "too late"
        return "second owner"

    handle = await zombie.enqueue()
    await app.run_worker(until_idle=True)

    assert lost == [LeaseLost]
    assert await handle.result(5) == "second owner"
    children = [one async for one in _tasks_of(app, "child")]
    assert len(children) == 1  # the detached one


async def _tasks_of(app: App, name: str) -> AsyncIterator[str]:
    from windlass.model.task import TaskFilter

    for record in await (await app.store()).tasks(TaskFilter(type=name)):
        yield record.id


async def _expire_claims(app: App) -> None:
    store: Any = await app.store()
    if app.url == "memory:":
        past = store._clock() - timedelta(seconds=1)
        for claim in store._claims.values():
            claim.expires_at = past
        return
    async with store._run.transaction() as connection:
        await connection.execute("UPDATE windlass.claim SET expires_at = '-infinity'")


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
    stopped: list[bool] = []

    @app.on_startup
    async def start() -> dict[str, int]:
        return {"pool": 7}

    @app.on_shutdown
    def stop() -> None:
        stopped.append(True)

    @app.task
    async def work(ctx: Context) -> int:
        return int(ctx.state["pool"])

    handle = await work.enqueue()
    await app.run_worker(until_idle=True)

    assert await handle.result(5) == 7
    assert stopped == [True]


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


async def test_at_the_deadline_what_still_runs_goes_back_without_an_attempt(app: App) -> None:
    started = asyncio.Event()

    @app.task
    async def endless() -> None:
        started.set()
        await asyncio.Event().wait()

    async with app.worker(shutdown_timeout=0.05):
        handle = await endless.enqueue()
        await asyncio.wait_for(started.wait(), 10)

    record = await handle.get()
    assert (record.status, record.attempts, record.generation) == (TaskState.PENDING, 0, 2)
    assert await (await app.store()).workers() == []


async def test_a_drain_finishes_what_runs_and_gives_back_what_waits(app: App) -> None:
    started = asyncio.Event()
    finish = asyncio.Event()

    @app.task
    async def slow() -> str:
        started.set()
        await finish.wait()
        return "finished"

    async with app.worker(concurrency=1) as worker:
        first = await slow.enqueue()
        second = await slow.enqueue()
        await asyncio.wait_for(started.wait(), 10)
        worker.stop()
        finish.set()

    assert await first.result(5) == "finished"
    assert (await second.get()).status is TaskState.PENDING


async def test_leases_of_long_tasks_are_kept_while_the_event_loop_is_blocked(app: App) -> None:
    @app.task(retry=1)
    async def blocking() -> str:
        time.sleep(2.5)  # longer than the lease: only the heart's own thread can keep it
        return "kept"

    handle = await blocking.enqueue()
    await app.run_worker(until_idle=True)

    assert await handle.result(5) == "kept"
    assert (await handle.get()).generation == 1


async def test_what_waits_in_the_buffer_for_too_long_is_given_back(app: App) -> None:
    hold = asyncio.Event()

    @app.task
    async def quick() -> None: ...

    @app.task
    async def slow() -> None:
        await hold.wait()

    async with app.worker(concurrency=1) as busy:
        busy._rate = 1000.0  # as if tasks had been short until now
        handles = [await slow.enqueue() for _ in range(5)]
        async with asyncio.timeout(10):
            while 1 in [(await handle.get()).generation for handle in handles[1:]]:
                busy._rate = 1000.0
                await asyncio.sleep(0.05)
        hold.set()
        for handle in handles:
            await handle.result(10)


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


async def test_a_lease_lost_before_a_job_began_costs_no_slot(app: App) -> None:
    ran: list[int] = []
    blocked = False

    @app.task
    async def work(n: int) -> None:
        nonlocal blocked
        ran.append(n)
        if not blocked:
            # The rest of the claim is started but has not begun when it is lost.
            blocked = True
            await _expire_claims(app)
            await (await app.store()).rescue(10)
            worker._claims_lost(list(worker._outstanding))

    async with app.worker(concurrency=5) as worker:
        handles = await app.enqueue_many([work.call(n) for n in range(10)])
        for handle in handles:
            await handle.result(10)
        async with asyncio.timeout(10):
            while worker.busy():
                await asyncio.sleep(0.01)

    assert set(ran) == set(range(10))


async def test_a_handler_enqueues_on_another_app_without_its_fence(app: App) -> None:
    other = App("memory:")

    @other.task
    async def elsewhere() -> None: ...

    @app.task(retry=1)
    async def work() -> str:
        async with other:
            return (await elsewhere.enqueue()).id

    handle = await work.enqueue()
    await app.run_worker(until_idle=True)

    assert await handle.result(5)


async def test_a_suspect_runs_alone_and_its_start_is_written_first(app: App) -> None:
    beside: list[int] = []
    status: list[str] = []
    running = 0

    @app.task
    async def normal() -> None:
        nonlocal running
        running += 1
        await asyncio.sleep(0.02)
        running -= 1

    @app.task
    async def suspect(ctx: Context) -> None:
        beside.append(running)
        status.append((await app.handle(ctx.task_id).get()).status)

    store = await app.store()
    handle = await suspect.enqueue()
    request = (await app.new_worker())._fetcher._request
    for _ in range(2):
        await store.claim(replace(request, limit=10))
        await _expire_claims(app)
        await store.rescue(10)
    await app.enqueue_many([normal.call() for _ in range(30)])
    await app.run_worker(until_idle=True, concurrency=5)

    assert (await handle.get()).status is TaskState.COMPLETED
    assert beside == [0]
    assert status == ["running"]


async def test_a_timeout_of_the_handler_s_own_is_not_called_that_of_the_task(app: App) -> None:
    @app.task(timeout=30, retry=1)
    async def inner() -> None:
        async with asyncio.timeout(0.01):
            await asyncio.Event().wait()

    handle = await inner.enqueue()
    await app.run_worker(until_idle=True)

    assert "30 s" not in ((await handle.get()).last_error or "")


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
