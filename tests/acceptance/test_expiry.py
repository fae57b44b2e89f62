"""Tasks that are of no use once they are late."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest

from acceptance.quick import QUICK
from windlass import App, Snooze, TaskCancelled


async def test_a_task_that_was_not_started_in_time_is_cancelled_and_not_run(app: App) -> None:
    ran: list[str] = []

    @app.task
    async def work(name: str) -> None:
        ran.append(name)

    late = await work.options(expires=0).enqueue("late")
    past = await work.options(expires=datetime.now(UTC) - timedelta(hours=1)).enqueue("past")
    good = await work.options(expires=timedelta(hours=1)).enqueue("good")
    async with app.worker():
        await good.result(10)
        for handle in (late, past):
            with pytest.raises(TaskCancelled, match="expired: it was not started in time"):
                await handle.result(10)

    assert ran == ["good"]
    assert (await late.get()).attempts == 0


async def test_a_task_that_waits_for_its_time_is_cancelled_by_the_leader(app: App) -> None:
    @app.task
    async def work() -> None: ...

    handle = await work.options(delay=3600, expires=0.2).enqueue()
    async with app.worker():
        with pytest.raises(TaskCancelled, match="expired"):
            await handle.result(20)


async def test_a_task_that_snoozed_goes_on_however_late_it_is(app: App) -> None:
    ran: list[int] = []

    @app.task
    async def work() -> None:
        ran.append(len(ran))
        if len(ran) == 1:
            raise Snooze(1.0)

    async with app.worker():
        handle = await work.options(expires=0.5).enqueue()
        await handle.result(20)

    assert ran == [0, 1]


async def test_many_at_once_expire_each_by_itself(app: App) -> None:
    @app.task
    async def work() -> None: ...

    calls = [work.options(expires=0 if n % 2 else 60).call() for n in range(10)]
    handles = await app.enqueue_many(calls)
    await app.run_worker(until_idle=True)

    statuses = [(await handle.get()).status for handle in handles]
    assert statuses == ["completed", "cancelled"] * 5


@pytest.mark.parametrize(
    "call",
    [
        "windlass.enqueue('work', expires => now() - interval '1 second')",
        'windlass.enqueue_many(\'[{"type": "work", "expires": 0}]\')',
        'windlass.enqueue_many(\'[{"type": "work", "expires": "2001-01-01T00:00:00Z"}]\')',
    ],
)
async def test_a_task_of_sql_expires_too(database_url: str, call: str) -> None:
    async with App(database_url, **QUICK) as app:

        @app.task
        async def work() -> None: ...

        connection = await asyncpg.connect(database_url)
        task_id: Any = await connection.fetchval(f"SELECT {call}")
        await connection.close()
        await app.run_worker(until_idle=True)

        assert (await app.handle(task_id).get()).status == "cancelled"


async def test_a_task_in_a_transaction_of_the_caller_expires_too(database_url: str) -> None:
    async with App(database_url, **QUICK) as app:

        @app.task
        async def work() -> None: ...

        connection = await asyncpg.connect(database_url)
        async with connection.transaction():
            handle = await work.options(expires=0, connection=connection).enqueue()
        await connection.close()
        await app.run_worker(until_idle=True)

        assert (await handle.get()).status == "cancelled"


async def test_what_waits_behind_a_long_task_does_not_begin_late(app: App) -> None:
    began = asyncio.Event()
    finish = asyncio.Event()
    ran: list[str] = []

    @app.task
    async def work(name: str) -> None:
        ran.append(name)
        began.set()
        await finish.wait()

    async with app.worker(concurrency=1):
        first = await work.enqueue("first")
        await began.wait()
        second = await work.options(expires=0.3).enqueue("second")
        with pytest.raises(TaskCancelled):
            await second.result(20)
        finish.set()
        await first.result(10)

    assert ran == ["first"]
