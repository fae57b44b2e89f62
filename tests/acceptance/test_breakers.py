"""Circuit breakers with real workers: which calls are made, what becomes of tasks, each way of use."""

import asyncio
import json
import threading
import time
from collections.abc import Callable
from math import ceil
from typing import Any

import pytest
from click.testing import CliRunner

from acceptance.probes import fetch
from acceptance.quick import QUICK
from windlass import (
    App,
    Breaker,
    BreakerOpen,
    ConfigurationError,
    Context,
    Fail,
    Retry,
    RetryAfter,
    Snooze,
    TaskFailed,
    TaskSet,
)
from windlass.cli import main
from windlass.testing import Clock, app_in_memory

SOON = Retry(max_attempts=30, base=0.01, jitter="none")
NEVER = 1000.0  # seconds of recovery: longer than any test


class Down(ConnectionError):  # noqa: N818 - as it is said
    """What a dependency that is down raises."""


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


async def open_by(breaker: Breaker) -> None:
    """Let calls fail until the circuit is open."""
    while breaker.state == "closed":
        with pytest.raises(Down):
            async with breaker:
                raise Down


# The trial


@pytest.mark.parametrize("is_warm", [False, True])
@pytest.mark.parametrize("use", ["task", "async with", "decorated", "thread"])
async def test_an_outage_costs_few_calls_and_no_attempts_of_those_that_met_it(
    app: App, is_warm: bool, use: str
) -> None:
    failures, recovery = 5, 0.2
    breaker = app.breaker("payments", failures=failures, recovery=recovery)
    is_down = False
    failed: list[tuple[int, float]] = []

    async def pay(n: int) -> int:
        await asyncio.sleep(0.02)  # all of them are under way before the first has failed
        if is_down:
            failed.append((n, time.monotonic()))
            raise Down
        return n

    @breaker
    async def pay_protected(n: int) -> int:
        return await pay(n)

    @app.task(retry=SOON, breaker="payments" if use == "task" else None)
    async def work(n: int) -> int:
        if use == "task":
            return await pay(n)
        if use == "async with":
            async with breaker:
                return await pay(n)
        return await pay_protected(n)

    @app.task(retry=SOON)
    def work_in_thread(n: int) -> int:
        with breaker:
            return asyncio.run(pay(n))

    task = work_in_thread if use == "thread" else work
    async with app.worker(concurrency=50):
        if is_warm:
            for handle in await app.enqueue_many([task.call(n) for n in range(10)]):
                await handle.result(timeout=20)
        is_down = True
        began = time.monotonic()
        handles = await app.enqueue_many([task.call(n) for n in range(50)])
        await until(lambda: len(failed) >= failures + 3)
        is_down = False
        results = [await handle.result(timeout=30) for handle in handles]

    lasted = failed[-1][1] - began
    assert len(failed) <= failures + ceil(lasted / recovery)
    assert results == list(range(50))
    numbers = [n for n, _ in failed]
    for n, handle in enumerate(handles):
        assert (await handle.get()).attempts == 1 + numbers.count(n)


async def test_a_dependency_that_answers_is_given_all_that_it_can_take() -> None:
    breaker = App("memory:").breaker("payments", failures=1)
    at_once = most = 0

    async def call() -> None:
        nonlocal at_once, most
        async with breaker:
            at_once += 1
            most = max(most, at_once)
            await asyncio.sleep(0.001)
            at_once -= 1

    await asyncio.gather(*(call() for _ in range(600)))

    assert most >= 30


async def test_calls_that_hang_hold_the_others_up_for_a_moment_only() -> None:
    breaker = App("memory:").breaker("payments", failures=2)
    begun = 0
    answer = asyncio.Event()

    async def call() -> None:
        nonlocal begun
        async with breaker:
            begun += 1
            await answer.wait()

    calls = [asyncio.create_task(call()) for _ in range(10)]
    await until(lambda: begun == 2)
    await until(lambda: begun == 10)  # none has failed: why should the others not be made
    answer.set()
    await asyncio.gather(*calls)

    assert breaker.report().refused == 0


# Put off


async def test_a_task_that_meets_an_open_circuit_is_put_off_without_an_attempt(app: App) -> None:
    breaker = app.breaker("payments", failures=1, recovery=600)
    await open_by(breaker)

    @app.task(breaker=breaker)
    async def work() -> None:
        raise AssertionError("it must not run")

    handle = await work.enqueue()
    await app.run_worker(until_idle=True)

    task = await handle.get()
    assert (task.status, task.attempts, task.started_at) == ("scheduled", 0, None)
    pause = (task.scheduled_for - task.created_at).total_seconds()
    assert pause >= breaker.half_open_in + 2


async def test_an_open_circuit_that_a_handler_meets_puts_it_off(app: App) -> None:
    breaker = app.breaker("payments", failures=1, recovery=600)
    await open_by(breaker)

    @app.task
    async def work(how: str) -> None:
        if how == "group":
            async with asyncio.TaskGroup() as group:
                group.create_task(protected())
                group.create_task(protected())
        await protected()

    @breaker
    async def protected() -> None: ...

    @app.task
    def plain() -> None:
        with breaker:
            pass

    handles = [await work.enqueue("alone"), await work.enqueue("group"), await plain.enqueue()]
    await app.run_worker(until_idle=True)

    tasks = [await handle.get() for handle in handles]
    assert [(task.status, task.attempts) for task in tasks] == [("scheduled", 0)] * 3


async def test_those_that_are_put_off_come_back_at_different_moments(app: App) -> None:
    breaker = app.breaker("payments", failures=1, recovery=100)
    await open_by(breaker)

    @app.task(breaker="payments")
    async def work(n: int) -> None: ...

    handles = await app.enqueue_many([work.call(n) for n in range(20)])
    await app.run_worker(until_idle=True)

    due = sorted([(await handle.get()).scheduled_for for handle in handles])
    assert (due[-1] - due[0]).total_seconds() > 5


async def test_an_opening_is_told_once(app: App, caplog: pytest.LogCaptureFixture) -> None:
    app.breaker("payments", failures=2, recovery=NEVER)

    @app.task(breaker="payments")
    async def work(n: int) -> None:
        raise Down

    await app.enqueue_many([work.call(n) for n in range(20)])
    await app.run_worker(until_idle=True)

    said = [line.levelname for line in caplog.records if "breaker.opened" in line.message]
    assert said == ["WARNING"]


# What counts


def failing(app: App, error: BaseException, **options: Any) -> Any:
    @app.task(retry=1, **options)
    async def work() -> None:
        raise error

    return work


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (Down(), "open"),
        (RetryAfter(1), "open"),
        (ValueError("of no known class"), "open"),
        (KeyError("of ours"), "closed"),
        (Fail("no such customer"), "closed"),
        (Snooze(1), "closed"),
    ],
)
@pytest.mark.parametrize("use", ["task", "block"])
async def test_the_class_of_an_error_decides_whether_it_counts(
    app: App, error: Exception, state: str, use: str
) -> None:
    breaker = app.breaker("payments", failures=1)
    if use == "task":
        await failing(app, error, breaker="payments").enqueue()
        await app.run_worker(until_idle=True)
    else:
        with pytest.raises(type(error)), breaker:
            raise error

    assert breaker.state == state


async def test_which_classes_count_can_be_said(app: App) -> None:
    breaker = app.breaker("payments", failures=1, counts=["code_bug"])
    app.error_rule("code-bug", type=Down)

    await failing(app, Down(), breaker="payments").enqueue()
    await app.run_worker(until_idle=True)

    assert breaker.state == "open"


@pytest.mark.parametrize("catches", [False, True])
async def test_an_attempt_that_overruns_counts(app: App, catches: bool) -> None:
    breaker = app.breaker("payments", failures=1, counts=["code-bug"])

    @app.task(breaker="payments", timeout=0.05, retry=1)
    async def work() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            if not catches:
                raise

    await work.enqueue()
    await app.run_worker(until_idle=True)

    assert breaker.state == "open"


async def test_a_block_in_which_the_attempt_overran_counts(app: App) -> None:
    breaker = app.breaker("payments", failures=1)
    other = app.breaker("other", failures=1)

    @app.task(timeout=0.05, retry=1)
    async def work() -> None:
        async with other:
            pass
        async with breaker:
            await asyncio.sleep(60)

    await work.enqueue()
    await app.run_worker(until_idle=True)

    assert (breaker.state, other.state) == ("open", "closed")


async def test_a_thread_in_which_the_attempt_overran_counts_when_it_returns(app: App) -> None:
    breaker = app.breaker("payments", failures=1)
    overran = threading.Event()

    @app.task(timeout=0.05, retry=1)
    def work() -> None:
        with breaker:
            overran.wait(20)

    async with app.worker():
        with pytest.raises(TaskFailed):
            await (await work.enqueue()).result(timeout=20)
        overran.set()
        await until(lambda: breaker.state == "open")


async def test_a_cancelled_task_says_nothing_and_frees_the_place_of_a_trial(app: App) -> None:
    breaker = app.breaker("payments", failures=1, recovery=0.01)
    await open_by(breaker)
    await until(lambda: breaker.state == "half-open")
    runs = asyncio.Event()

    @app.task(breaker="payments")
    async def work(is_first: bool) -> str:
        if is_first:
            runs.set()
            await asyncio.sleep(60)
        return "done"

    async with app.worker():
        first = await work.enqueue(True)
        await asyncio.wait_for(runs.wait(), 20)
        await first.cancel("no need")
        assert await (await work.enqueue(False)).result(timeout=20) == "done"

    assert breaker.state == "closed"


# Time limits of a breaker


@pytest.mark.parametrize("use", ["async with", "decorated"])
async def test_a_coroutine_that_takes_too_long_is_cancelled_and_counts(use: str) -> None:
    breaker = App("memory:").breaker("payments", failures=1, timeout=0.01, counts=["code-bug"])

    @breaker
    async def decorated() -> None:
        await asyncio.sleep(60)

    async def block() -> None:
        async with breaker:
            await asyncio.sleep(60)

    call = decorated if use == "decorated" else block
    with pytest.raises(TimeoutError, match=r"breaker 'payments': took longer than 0\.01 s"):
        await call()

    assert breaker.state == "open"


@pytest.mark.parametrize("use", ["with", "decorated"])
def test_a_plain_call_that_took_too_long_counts_when_it_returns(use: str) -> None:
    breaker = App("memory:").breaker("payments", failures=1, timeout=0.01)

    @breaker
    def decorated() -> int:
        time.sleep(0.02)
        return 7

    if use == "decorated":
        assert decorated() == 7
    else:
        with breaker:
            time.sleep(0.02)

    assert breaker.state == "open"


# Fallbacks


async def test_a_fallback_runs_instead_of_a_task_that_is_not_let_through(app: App) -> None:
    breaker = app.breaker("payments", failures=1, recovery=NEVER)
    await open_by(breaker)

    async def guess(ctx: Context, n: int, /, more: str = "x") -> str:
        return f"{ctx.attempt} {n} {more} by a coroutine"

    def look_up(n: int) -> str:
        return f"{n} in thread {threading.current_thread() is not threading.main_thread()}"

    @app.task(breaker="payments", fallback=guess)
    async def price(ctx: Context, n: int, /, more: str) -> str:
        raise AssertionError

    @app.task(breaker="payments", fallback=look_up)
    async def stock(n: int) -> str:
        raise AssertionError

    async with app.worker():
        handles = [await price.enqueue(7, more="y"), await stock.enqueue(8)]
        results = [await handle.result(timeout=20) for handle in handles]

    assert results == ["1 7 y by a coroutine", "8 in thread True"]
    assert breaker.state == "open"


async def test_a_fallback_of_a_breaker_stands_in_for_all_that_it_protects(app: App) -> None:
    def nothing(n: int) -> str:
        return f"nothing for {n}"

    breaker = app.breaker("payments", failures=1, recovery=NEVER, fallback=nothing)
    await open_by(breaker)

    @app.task(breaker="payments")
    async def work(n: int) -> str:
        raise AssertionError

    @breaker
    async def coroutine(n: int) -> str:
        raise AssertionError

    @breaker
    def plain(n: int) -> str:
        raise AssertionError

    async with app.worker():
        assert await (await work.enqueue(1)).result(timeout=20) == "nothing for 1"
    assert await coroutine(2) == "nothing for 2"
    assert plain(3) == "nothing for 3"


# Ways of use


async def test_a_protected_function_is_a_task_like_any_other(app: App) -> None:
    breaker = app.breaker("payments")

    @app.task
    @breaker
    async def work(n: int) -> int:
        return n

    @app.task
    @breaker
    def plain(n: int) -> int:
        return n

    async with app.worker():
        assert await (await work.enqueue(1)).result(timeout=20) == 1
        assert await (await plain.enqueue(2)).result(timeout=20) == 2


def test_the_lock_is_not_held_over_a_call() -> None:
    breaker = App("memory:").breaker("payments", failures=4)
    together = threading.Barrier(4, timeout=20)

    @breaker
    def call() -> None:
        together.wait()

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert not together.broken


def test_threads_that_meet_an_open_circuit_are_refused_and_told_when_to_come_back() -> None:
    breaker = App("memory:").breaker("payments", failures=1, recovery=60)
    with pytest.raises(Down), breaker:
        raise Down

    with pytest.raises(BreakerOpen, match="breaker 'payments' lets no call through") as raised:
        breaker.__enter__()

    assert raised.value.name == "payments"
    assert raised.value.seconds > breaker.half_open_in > 0


async def test_blocks_of_several_breakers_and_tasks_are_told_apart() -> None:
    app = App("memory:")
    inner, outer = app.breaker("inner", failures=1), app.breaker("outer", failures=1)

    async def call(error: Exception | None) -> None:
        async with outer:
            try:
                async with inner:
                    await asyncio.sleep(0)
                    if error is not None:
                        raise error
            except Down:
                return

    await asyncio.gather(call(None), call(Down()))

    assert (inner.state, outer.state) == ("open", "closed")


async def test_a_set_of_tasks_may_name_a_breaker(app: App) -> None:
    tasks = TaskSet()

    @tasks.task(breaker="payments")
    async def work() -> str:
        return "done"

    app.breaker("payments")
    app.include(tasks)

    async with app.worker():
        assert await (await work.enqueue()).result(timeout=20) == "done"


# What is refused


async def test_an_unknown_breaker_is_refused_when_a_worker_starts() -> None:
    app = App("memory:")

    @app.task(breaker="payment")
    async def work() -> None: ...

    app.breaker("payments")
    with pytest.raises(ConfigurationError, match=r"task 'work': breaker 'payment' .* 'payments'"):
        await app.run_worker(until_idle=True)


def test_two_breakers_of_one_name_are_alike_or_refused() -> None:
    app = App("memory:")
    breaker = app.breaker("payments", failures=3)

    assert app.breaker("payments", failures=3) is breaker
    with pytest.raises(ConfigurationError, match="breaker 'payments' is made twice"):
        app.breaker("payments", failures=4)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"failures": 0}, "breaker 'x': failures 0"),
        ({"failures": True}, "breaker 'x': failures True"),
        ({"within": 0}, "breaker 'x': within 0"),
        ({"recovery": -1}, "breaker 'x': recovery -1"),
        ({"recovery": "30"}, "breaker 'x': recovery '30'"),
        ({"trials": 1.5}, r"breaker 'x': trials 1\.5"),
        ({"mode": "some"}, "breaker 'x': mode 'some' is not known"),
        ({"rate": 0}, "breaker 'x': rate 0"),
        ({"rate": 1.1}, r"breaker 'x': rate 1\.1"),
        ({"minimum": 0}, "breaker 'x': minimum 0"),
        ({"counts": "transient"}, "breaker 'x': counts 'transient'"),
        ({"counts": []}, "breaker 'x': counts"),
        ({"counts": ["odd"]}, "breaker 'x': counts 'odd' is not known"),
        ({"timeout": 0}, "breaker 'x': timeout 0"),
        ({"fallback": 3}, "breaker 'x': fallback 3"),
        ({"shared": "no"}, "breaker 'x': shared 'no'"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        App("memory:").breaker("x", **options)


def test_a_name_is_a_name() -> None:
    with pytest.raises(ConfigurationError, match="breaker"):
        App("memory:").breaker("")


async def test_fallbacks_that_do_not_fit_are_refused() -> None:
    app = App("memory:")

    def needs_more(n: int, more: int) -> None: ...
    async def work(n: int) -> None: ...
    def plain(n: int) -> None: ...

    with pytest.raises(ConfigurationError, match=r"task 'work': fallback .*needs_more.* 'more'"):
        app.task(breaker="x", fallback=needs_more)(work)
    with pytest.raises(ConfigurationError, match=r"task 'work': fallback .* give breaker="):
        app.task(fallback=work)(work)
    with pytest.raises(ConfigurationError, match="task 'work': breaker 3"):
        app.task(breaker=3)(work)  # type: ignore[call-overload]
    app.breaker("y", fallback=needs_more)
    app.task(breaker="y")(work)
    with pytest.raises(ConfigurationError, match=r"breaker 'y': fallback .*needs_more"):
        await app.run_worker(until_idle=True)
    with pytest.raises(ConfigurationError, match="its fallback is a coroutine function"):
        app.breaker("z", fallback=work)(plain)


def test_what_cannot_be_protected_is_refused() -> None:
    app = App("memory:")
    breaker = app.breaker("x")

    @app.task
    async def work() -> None: ...

    def numbers() -> Any:
        yield 1

    with pytest.raises(ConfigurationError, match=r"put @app\.task above"):
        breaker(work)
    with pytest.raises(ConfigurationError, match="a generator function"):
        breaker(numbers)


async def test_in_memory_a_breaker_begins_closed_and_goes_by_the_clock_of_the_test() -> None:
    app = App("memory:")
    breaker = app.breaker("payments", failures=1)
    await open_by(breaker)
    clock = Clock()

    async with app_in_memory(app, clock=clock):
        assert breaker.state == "closed"
        await open_by(breaker)
        clock.move(31)
        assert breaker.state == "half-open"

    assert breaker.state == "closed"


# What is shown


async def test_metrics_show_the_state_and_count_what_was_not_let_through(
    app_url: str, port: int
) -> None:
    async with App(app_url, **QUICK, health_port=port) as app:
        breaker = app.breaker("payments", failures=1, recovery=NEVER)
        app.breaker("mail")

        @app.task(breaker="payments", retry=1)
        async def work() -> None:
            raise Down

        async with app.worker():
            await (await work.enqueue()).get()
            await until(lambda: breaker.state == "open")
            await work.enqueue()
            await until(lambda: breaker.report().refused == 1)
            _, page = await asyncio.to_thread(fetch, port, "/metrics")

    shown = page.decode().splitlines()
    assert 'windlass_breaker_state{breaker="payments",state="open"} 1.0' in shown
    assert 'windlass_breaker_state{breaker="payments",state="closed"} 0.0' in shown
    assert 'windlass_breaker_state{breaker="payments",state="half-open"} 0.0' in shown
    assert 'windlass_breaker_state{breaker="mail",state="closed"} 1.0' in shown
    assert 'windlass_breaker_opened_total{breaker="payments"} 1.0' in shown
    assert 'windlass_breaker_refused_total{breaker="payments"} 1.0' in shown
    assert 'windlass_breaker_refused_total{breaker="mail"} 0.0' in shown


async def test_the_list_of_workers_shows_breakers_that_are_not_closed(database_url: str) -> None:
    async with App(database_url, **QUICK) as app:
        breaker = app.breaker("payments", failures=1, recovery=NEVER)
        app.breaker("mail")
        await open_by(breaker)

        async with app.worker():  # its first beat has said so
            command = ["workers", "list"]
            environment = {"WINDLASS_DATABASE_URL": database_url}
            listed = await asyncio.to_thread(
                CliRunner().invoke, main, command, env=environment, catch_exceptions=False
            )
            as_json = await asyncio.to_thread(
                CliRunner().invoke, main, [*command, "--json"], env=environment
            )

    assert "payments open" in listed.stdout
    assert "mail" not in listed.stdout
    (worker,) = json.loads(as_json.stdout)
    assert worker["breakers"] == {"payments": "open", "mail": "closed"}
