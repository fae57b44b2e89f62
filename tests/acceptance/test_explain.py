"""Why a task is not running, as users ask for it."""

import asyncio
import json
import os
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner

from windlass import App, Explanation, Limit, TaskNotFound
from windlass.cli import main
from windlass.model.explanation import Buffered, LimitReached, QueuePaused, Running, WaitsForTime

UNKNOWN = "01890000-0000-7000-8000-000000000000"


def kinds(explanation: Explanation) -> list[str]:
    return [reason.kind for reason in explanation.reasons]


async def test_a_handle_says_why_its_task_does_not_run(app: App) -> None:
    @app.task(queue="mail")
    async def send() -> None: ...

    handle = await send.enqueue()
    await app.queues.pause("mail")

    told = await handle.explain()

    assert (told.task_id, told.claimable, told.has_worker) == (handle.id, False, False)
    assert kinds(told) == ["queue_paused", "nobody_handles"]
    assert isinstance(told.reasons[0], QueuePaused)
    assert str(told).splitlines()[0] == f"task {handle.id} is pending, and cannot be claimed now"


async def test_a_limit_is_told_with_the_task_that_runs(app: App) -> None:
    begun, go = asyncio.Event(), asyncio.Event()

    @app.task(limit=Limit(concurrency=1))
    async def work() -> None:
        begun.set()
        await go.wait()

    async with app.worker(concurrency=5):
        first = await work.enqueue()
        await begun.wait()
        second = await work.enqueue()
        running = (await first.explain()).reasons[0]
        reason = (await second.explain()).reasons[0]
        go.set()
        await second.result(20)
        ended = await second.explain()

    assert isinstance(running, Running | Buffered)
    assert isinstance(reason, LimitReached)
    assert [str(holder.task_id) for holder in reason.holders] == [first.id]
    assert str(reason.holders[0].worker_id) == running.worker_id
    assert kinds(ended) == ["ended"]


@pytest.mark.parametrize("by", ["breaker", "refusal"])
async def test_a_task_that_was_never_let_begin_names_its_breaker(app: App, by: str) -> None:
    breaker = app.breaker("payments", failures=1, recovery=600)

    @app.task(breaker="payments" if by == "breaker" else None)
    async def pay() -> None:
        async with breaker:
            raise ConnectionError("away")

    async with app.worker():
        first = await pay.enqueue()
        while (await first.get()).status != "scheduled":
            await asyncio.sleep(0.01)
        second = await pay.enqueue()
        while (await second.get()).status != "scheduled":
            await asyncio.sleep(0.01)
        told = await second.explain()

    (reason, *_) = told.reasons
    assert isinstance(reason, WaitsForTime)
    assert reason.until == (await second.get()).scheduled_for
    assert "it was put off: breaker 'payments' let no call through" in str(reason)
    assert (await second.get()).attempts == 0


async def test_a_task_that_nobody_knows_is_not_found(app: App) -> None:
    with pytest.raises(TaskNotFound):
        await app.handle(UNKNOWN).explain()


def test_synchronous_code_asks_as_well() -> None:
    app = App("memory:")

    @app.task
    def send() -> None: ...

    with app:
        assert kinds(send.enqueue_sync().explain_sync()) == ["nobody_handles"]


class TestCommand:
    """The same by command."""

    @pytest.fixture
    def windlass(self, database_url: str) -> Callable[..., str]:
        environment = {**os.environ, "WINDLASS_DATABASE_URL": database_url}

        def run(*arguments: str) -> str:
            done = CliRunner().invoke(main, arguments, env=environment)
            assert done.exit_code == 0, done.output
            return done.output

        return run

    @pytest.fixture
    def task_id(self, windlass: Callable[..., str], database_url: str) -> str:
        async def add() -> str:
            async with App(database_url) as app:
                return (await app.enqueue("send", {}, queue="mail", expires=3600)).id

        windlass("queues", "pause", "mail")
        windlass("types", "pause", "send")
        return asyncio.run(add())

    def test_there_is_a_line_for_each_reason(
        self, windlass: Callable[..., str], task_id: str
    ) -> None:
        first, *reasons = windlass("tasks", "explain", task_id).splitlines()

        assert first == f"task {task_id} is pending, and cannot be claimed now"
        assert [reason.split(" since ")[0].split(" by ")[0] for reason in reasons] == [
            "queue 'mail' is paused",
            "type 'send' is paused",
            "no worker is alive",
            "it is cancelled unless it begins",
        ]

    def test_json_has_the_fields_of_each_reason(
        self, windlass: Callable[..., str], task_id: str
    ) -> None:
        told: dict[str, Any] = json.loads(windlass("tasks", "explain", task_id, "--json"))

        reasons = told.pop("reasons")
        assert told.keys() == {"task_id", "status", "at", "claimable", "has_worker"}
        assert (told["task_id"], told["status"], told["claimable"]) == (task_id, "pending", False)
        assert reasons[0].keys() == {"reason", "text", "queue", "since"}
        assert (reasons[0]["reason"], reasons[0]["queue"]) == ("queue_paused", "mail")
