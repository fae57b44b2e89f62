"""Retries that end before their attempts do, and what follows the end of a task."""

import asyncio
import json
import time
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from click.testing import CliRunner

from acceptance.quick import QUICK
from windlass import App, Budget, ConfigurationError, Context, Fail, Retry, TaskFailed
from windlass.cli import main
from windlass.client import verbs
from windlass.model.task import ClaimRequest, Outcome, Settlement

SOON = Retry(max_attempts=30, base=0.01, jitter="none")


async def test_a_task_is_given_up_when_it_is_too_old(app: App) -> None:
    @app.task(retry=Retry(max_attempts=1000, backoff="fixed", base=0.1, jitter="none", max_age=0.5))
    async def hopeless() -> None:
        raise ConnectionError("still away")

    async with app.worker():
        handle = await hopeless.enqueue()
        with pytest.raises(TaskFailed, match="still away"):
            await handle.result(20)

    record = await handle.get()
    assert record.status == "dead"
    assert record.attempts < 1000
    assert "more than 0.5 s" in record.errors[-1]["given_up"]


@pytest.mark.parametrize("wrong", [0, -1, float("nan"), "a day", True, timedelta(0)])
def test_a_wrong_age_is_named(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match="retry: max_age"):
        Retry(max_age=wrong)


def test_an_age_may_be_a_timedelta() -> None:
    assert Retry(max_age=timedelta(days=1)).max_age == 86_400


async def test_stopped_retries_are_none_until_they_are_allowed_again(app: App) -> None:
    tried = asyncio.Queue[str]()

    @app.task(retry=Retry(max_attempts=3, base=3600, jitter="none"))
    async def flaky(name: str) -> None:
        tried.put_nowait(name)
        raise ConnectionError(name)

    async with app.worker():
        waiting = await flaky.enqueue("before")
        assert await asyncio.wait_for(tried.get(), 10) == "before"
        async with asyncio.timeout(10):
            while (await waiting.get()).status != "scheduled":
                await asyncio.sleep(0.01)

        assert await app.stop_retries("flaky", "the bank is closed") == 1
        with pytest.raises(TaskFailed, match="before"):
            await waiting.result(10)
        meanwhile = await flaky.enqueue("meanwhile")
        with pytest.raises(TaskFailed, match="meanwhile"):
            await meanwhile.result(10)
        assert await app.allow_retries("flaky")
        after = await flaky.enqueue("after")
        await asyncio.wait_for(tried.get(), 10)
        await asyncio.wait_for(tried.get(), 10)
        async with asyncio.timeout(10):
            while (await after.get()).status != "scheduled":
                await asyncio.sleep(0.01)

    record = await meanwhile.get()
    assert (record.status, record.attempts) == ("dead", 1)
    assert "the bank is closed" in record.errors[-1]["given_up"]


async def test_stopping_ends_what_is_due_again_and_waits_for_a_worker(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verbs, "BURIED_AT_ONCE", 2)
    store = await app.store()
    again = [await app.enqueue("flaky", queue=f"q{number % 2}") for number in range(5)]
    request = ClaimRequest(uuid4(), ("flaky",), 5, timedelta(minutes=1), timedelta(seconds=6))
    claim = (await store.claim(request)).claim
    assert claim is not None
    error = '{"type": "ConnectionError", "message": "away"}'
    await store.settle(
        [
            Settlement(claim.token, task.id, task.generation, Outcome.RETRIED, error=error)
            for task in claim.tasks
        ]
    )
    first = await app.enqueue("flaky", queue="q0")

    assert await app.stop_retries("flaky", "the bank is closed") == 5

    assert {(await handle.get()).status for handle in again} == {"dead"}
    assert (await first.get()).status == "pending"


async def test_a_call_follows_the_end_of_a_task(app: App) -> None:
    heard: list[Any] = []

    @app.task
    async def celebrate(task_id: str, result: dict[str, int], level: int = 1) -> None:
        heard.append((task_id, result, level))

    @app.task
    async def mourn(error: dict[str, str], attempts: int, where: str) -> None:
        heard.append((error["class"], error["message"], attempts, where))

    @app.task(
        retry=Retry(max_attempts=2, base=0.01, jitter="none"),
        on_success=celebrate,
        on_failure=mourn.options(priority="high").partial(where="here"),
    )
    async def work(ctx: Context, how: str) -> dict[str, int]:
        if how == "fail":
            raise Fail("no")
        if how == "die" or (how == "flaky" and ctx.attempt == 1):
            raise ConnectionError("away")
        return {"attempt": ctx.attempt}

    async with app.worker():
        handles = [await work.enqueue(how) for how in ("", "flaky", "fail", "die")]
        async with asyncio.timeout(20):
            while len(heard) < 4:
                await asyncio.sleep(0.01)

    assert sorted(heard, key=str) == sorted(
        [
            (handles[0].id, {"attempt": 1}, 1),
            (handles[1].id, {"attempt": 2}, 1),
            ("permanent-input", "no", 1, "here"),
            ("transient", "away", 2, "here"),
        ],
        key=str,
    )


@pytest.mark.parametrize("depth", [1, 200])
async def test_a_call_that_is_too_large_or_too_deep_costs_no_other(app: App, depth: int) -> None:
    heard: list[Any] = []

    @app.task
    async def after(n: int, task_id: str, result: Any) -> None:
        heard.append((task_id, result))

    @app.task(on_success=after.partial(n=1))
    async def work(deep: bool) -> Any:
        value: Any = 1
        for _ in range(depth if deep else 1):
            value = [value]
        return value

    handles = [await work.enqueue(number == 3) for number in range(6)]
    await app.run_worker(until_idle=True)

    results = dict(heard)
    assert set(results) == {handle.id for handle in handles}
    assert [results[handle.id] for handle in handles if handle is not handles[3]] == [[1]] * 5


async def test_a_message_that_is_too_long_is_cut_for_what_follows(database_url: str) -> None:
    heard: list[str] = []
    async with App(database_url, **QUICK, max_payload_bytes=4096) as app:

        @app.task
        async def after(error: dict[str, str]) -> None:
            heard.append(error["message"])

        @app.task(on_failure=after)
        async def work(length: int) -> None:
            raise Fail("x" * length)

        for length in (1, 9000, 2):
            await work.enqueue(length)
        await app.run_worker(until_idle=True)

    assert sorted(map(len, heard)) == [1, 2, 200]


async def test_a_predicate_is_asked_about_an_attempt_that_took_too_long(app: App) -> None:
    asked: list[type[BaseException]] = []

    def refuse(error: BaseException) -> bool:
        asked.append(type(error))
        return False

    @app.task(retry=Retry(max_attempts=3, base=0.0, when=refuse), timeout=0.1)
    async def slow() -> None:
        await asyncio.sleep(60)

    handle = await slow.enqueue()
    await app.run_worker(until_idle=True)

    record = await handle.get()
    assert (record.attempts, asked) == (1, [TimeoutError])


async def test_a_rule_may_speak_of_attempts_that_took_too_long(app: App) -> None:
    app.error_rule(type=TimeoutError, error_class="permanent-input")

    @app.task(retry=3, timeout=0.1)
    async def slow() -> None:
        await asyncio.sleep(60)

    handle = await slow.enqueue()
    await app.run_worker(until_idle=True)

    assert (await handle.get()).error_class == "permanent-input"


async def test_a_call_follows_a_completion_in_the_handlers_own_transaction(
    database_url: str,
) -> None:
    heard = asyncio.Event()
    async with App(database_url, **QUICK) as app:

        @app.task
        async def after(result: int) -> None:
            if result == 7:
                heard.set()

        @app.task(on_success=after)
        async def work(ctx: Context) -> None:
            async with ctx.transaction():
                ctx.complete(7)

        async with app.worker():
            await work.enqueue()
            await asyncio.wait_for(heard.wait(), 10)


def test_what_cannot_be_called_is_refused_where_it_is_written() -> None:
    app = App("memory:")

    @app.task
    async def alert(level: int, task_id: str) -> None: ...

    for given, said in (
        (alert, "argument 'level' is missing; give it in the call, or name the parameter"),
        (alert.partial("high"), "on_failure: task 'alert': Expected `int`"),
        ("alert", "on_failure 'alert': give a task, or a call of one"),
        (alert.options(idempotency_key="k").partial(1), "option 'idempotency_key' belongs to"),
    ):
        with pytest.raises(ConfigurationError, match=said.replace("`", ".")):
            app.task(name="work", on_failure=given)(lambda: None)  # type: ignore[arg-type]


async def test_the_command_stops_and_allows_retries(database_url: str) -> None:
    async with App(database_url, **QUICK) as app:

        @app.task(queue="bank", retry=2)
        async def flaky() -> None: ...

        await app.run_worker(until_idle=True)

    def said_by(*arguments: str) -> str:
        ran = CliRunner().invoke(
            main, ["types", *arguments], env={"WINDLASS_DATABASE_URL": database_url}
        )
        assert ran.exit_code == 0, ran.output
        return ran.output

    async def ask(*arguments: str) -> str:
        return await asyncio.to_thread(said_by, *arguments)

    assert "0 that waited for one are dead" in await ask("stop-retries", "flaky", "--reason", "why")
    (record,) = json.loads(await ask("list", "--json"))
    assert (record["name"], record["queue"], record["retries_stopped_because"]) == (
        "flaky",
        "bank",
        "why",
    )
    assert "stopped at" in await ask("list")
    assert "are allowed again" in await ask("allow-retries", "flaky")
    assert "were not stopped" in await ask("allow-retries", "flaky")


def test_retries_are_stopped_from_synchronous_code_too() -> None:
    app = App("memory:")

    assert app.stop_retries_sync("work") == 0
    assert app.allow_retries_sync("work") is True
    app.close_sync()


async def test_a_budget_lets_retries_wait_and_loses_none(app: App) -> None:
    attempts: list[int] = []
    is_up = False

    @app.task(
        retry=Retry(
            max_attempts=50,
            backoff="fixed",
            base=0.01,
            jitter="none",
            budget=Budget(share=0, window=1, at_least=3),
        )
    )
    async def work(ctx: Context) -> None:
        attempts.append(ctx.attempt)
        if not is_up:
            raise ConnectionError("away")

    async with app.worker():
        handles = [await work.enqueue() for _ in range(20)]
        began = time.monotonic()
        async with asyncio.timeout(30):
            while len(attempts) < 26:
                await asyncio.sleep(0.01)
        # Twenty first attempts, and of retries three in each second at most.
        windows = int(time.monotonic() - began) + 2
        assert len(attempts) - 20 <= 3 * windows
        is_up = True
        for handle in handles:
            await handle.result(60)

    records = [await handle.get() for handle in handles]
    assert {record.status for record in records} == {"completed"}
    assert sum(record.attempts for record in records) == len(attempts)


@pytest.mark.parametrize("by", ["budget", "breaker", "refusal"])
async def test_a_retry_that_is_put_off_until_it_is_too_old_is_given_up(app: App, by: str) -> None:
    breaker = app.breaker("payments", failures=1, recovery=600)
    budget = Budget(share=0, window=600, at_least=1) if by == "budget" else None
    once_more = Retry(max_attempts=50, base=0, jitter="none", max_age=30, budget=budget)

    @app.task(retry=once_more, breaker="payments" if by == "breaker" else None)
    async def work() -> None:
        if by == "refusal":
            async with breaker:
                raise ConnectionError("away")
        raise ConnectionError("away")

    async with app.worker():
        handle = await work.enqueue()
        with pytest.raises(TaskFailed):
            await handle.result(60)

    record = await handle.get()
    attempts = 2 if by == "budget" else 1
    said = "its retry budget was used up"
    if by != "budget":
        said = "breaker 'payments' let no call through"
    assert (record.status, record.attempts) == ("dead", attempts)
    assert [error["message"] for error in record.errors] == ["away"] * attempts
    given_up = record.errors[-1]["given_up"]
    assert given_up == (
        f"its next attempt would begin more than 30 s after it was enqueued; put off: {said}"
    )
