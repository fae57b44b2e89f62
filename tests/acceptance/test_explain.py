"""Why a task is not running, as users ask for it."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from typing import Any
from urllib.parse import urlsplit, urlunsplit
from uuid import uuid4

import asyncpg
import pytest
from click.testing import CliRunner

from acceptance.quick import QUICK
from windlass import App, Explanation, Limit, TaskNotFound
from windlass.cli import main
from windlass.model.explanation import (
    Buffered,
    LimitReached,
    NobodyHandles,
    QueuePaused,
    Running,
    WaitsForTime,
)

UNKNOWN = "01890000-0000-7000-8000-000000000000"


async def _work() -> None: ...


async def _call(to: str) -> None: ...


def as_role(url: str, role: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=f"{role}:secret@{parts.netloc.rpartition('@')[2]}"))


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


async def test_a_queue_of_which_a_worker_runs_as_many_as_it_may_is_told(app_url: str) -> None:
    begun, go = asyncio.Event(), asyncio.Event()

    async with App(app_url, **(QUICK | {"heartbeat": 0.2})) as app:

        @app.task(queue="mail")
        async def work() -> None:
            begun.set()
            await go.wait()

        async with app.worker(queue_concurrency={"mail": 1}, concurrency=5):
            await work.enqueue()
            await begun.wait()
            second = await work.enqueue()
            async with asyncio.timeout(15):
                while "queue_busy" not in kinds(told := await second.explain()):
                    await asyncio.sleep(0.01)
            go.set()
            await second.result(20)

    assert told.claimable
    assert told.has_worker


async def test_a_worker_that_ends_by_itself_handles_nothing_from_then_on(app_url: str) -> None:
    begun, go = asyncio.Event(), asyncio.Event()

    async with App(app_url, lease=60, heartbeat=20) as app:  # a beat would come much later

        @app.task
        async def work() -> None: ...

        @app.task
        async def held() -> None:
            begun.set()
            await go.wait()

        await held.enqueue()
        handle = await work.options(delay=60).enqueue()

        async def told_while_it_drains() -> Explanation:
            try:
                async with asyncio.timeout(15):
                    while (told := await handle.explain()).has_worker:
                        await asyncio.sleep(0.01)
                return told
            finally:
                go.set()

        async with app.worker():
            await begun.wait()
            before = await handle.explain()
            asking = asyncio.create_task(told_while_it_drains())
        told = await asking
        after = await handle.explain()

    assert before.has_worker
    (reason,) = [one for one in told.reasons if isinstance(one, NobodyHandles)]
    assert reason.handle_type[0].endswith(" (draining)")
    assert kinds(after) == ["waits_for_time", "nobody_handles"]


async def test_a_task_that_nobody_knows_is_not_found(app: App) -> None:
    with pytest.raises(TaskNotFound):
        await app.handle(UNKNOWN).explain()


async def test_what_its_key_has_room_for_is_let_through_before_it_is_explained(app: App) -> None:
    handle = await app.enqueue("send", {}, ordering_key="k")

    assert kinds(await handle.explain()) == ["nobody_handles"]


class TestReaders:
    """Whoever may only read."""

    @pytest.fixture
    async def sql(self, sql_url: str) -> AsyncIterator[asyncpg.Connection]:
        connection = await asyncpg.connect(sql_url)
        yield connection
        await connection.close()

    @pytest.fixture
    async def reader(self, sql: asyncpg.Connection) -> AsyncIterator[str]:
        """A role that may read all there is, and enqueue."""
        role = f"reader_{uuid4().hex}"
        await sql.execute(
            f"CREATE ROLE {role} LOGIN PASSWORD 'secret'; GRANT USAGE ON SCHEMA windlass TO {role}; "
            f"GRANT SELECT ON ALL TABLES IN SCHEMA windlass TO {role}; "
            f"GRANT INSERT ON windlass.gate_call, windlass.gate_entry TO {role}"
        )
        yield role
        await sql.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")

    async def add(self, url: str) -> dict[str, str]:
        """Enqueue a task for each thing to explain; return their ids."""
        async with App(url) as app:
            app.task(name="work")(_work)
            call = app.task(name="call", limit=Limit(concurrency=1, by="to"))(_call)
            done = await app.enqueue("work", {})
            await app.run_worker(until_idle=True)
            await app.queues.change("mail", concurrency=5)
            await app.enqueue_many([call.call("ada"), call.call("ada")])
            handles = {
                "ended": done,
                "nobody_handles": await app.enqueue("send", {}, queue="mail"),
                "waits_for_time": await app.enqueue("send", {}, delay=60),
                "gate_called": await app.enqueue("send", {}, ordering_key="k"),
                "value_limit_reached": await call.enqueue("ada"),
                "key_held": await app.enqueue("send", {}, ordering_key="k"),
            }
            return {kind: handle.id for kind, handle in handles.items()}

    @pytest.mark.parametrize("how", ["role", "session"])
    async def test_whoever_may_only_read_has_anything_explained(
        self, sql: asyncpg.Connection, sql_url: str, reader: str, how: str
    ) -> None:
        added = await self.add(sql_url)
        if how == "session":
            await sql.execute(f"GRANT ALL ON ALL TABLES IN SCHEMA windlass TO {reader}")
            await sql.execute(f"ALTER ROLE {reader} SET default_transaction_read_only = on")
        calls = await sql.fetch("SELECT * FROM windlass.gate_call")

        async with App(as_role(sql_url, reader)) as app:
            told = {kind: await app.handle(one).explain() for kind, one in added.items()}

        for kind, explanation in told.items():
            assert kind in kinds(explanation)
        assert told["gate_called"].claimable
        assert await sql.fetch("SELECT * FROM windlass.gate_call") == calls != []

    async def test_whoever_may_write_what_a_claim_writes_lets_through(
        self, sql: asyncpg.Connection, sql_url: str, reader: str
    ) -> None:
        added = await self.add(sql_url)
        await sql.execute(f"GRANT ALL ON ALL TABLES IN SCHEMA windlass TO {reader}")

        async with App(as_role(sql_url, reader)) as app:
            ended = await app.handle(added["ended"]).explain()
            calls = await sql.fetch("SELECT * FROM windlass.gate_call")
            told = await app.handle(added["gate_called"]).explain()

        assert kinds(ended) == ["ended"]
        assert calls != []
        assert kinds(told) == ["nobody_handles"]
        assert await sql.fetch("SELECT * FROM windlass.gate_call") == []


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
