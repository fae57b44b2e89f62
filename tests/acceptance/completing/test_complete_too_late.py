"""An attempt that is over completes nothing, and enqueues nothing."""

import asyncio
from contextlib import suppress
from datetime import timedelta
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from acceptance.completing.effects import check_nothing_left, done, effects
from windlass import App, Context, LeaseLost, Retry, StoreUnavailable, TaskState
from windlass.model.task import (
    Answer,
    ClaimRequest,
    Completion,
    Fence,
    Outcome,
    Settlement,
    WorkerInfo,
)
from windlass.runtime.metrics import Metrics
from windlass.telemetry import unwatch, watch

WORKER = UUID(int=1)


@pytest.mark.parametrize("when", ["before", "within"])
async def test_a_lease_that_is_gone_takes_everything_back(
    app: App, look: asyncpg.Connection, when: str
) -> None:
    told: list[BaseException] = []
    rescued: list[str] = []

    async def rescue(task_id: str) -> None:
        rescued.append(task_id)
        await look.execute("UPDATE windlass.claim SET expires_at = clock_timestamp()")
        await look.execute("SELECT * FROM windlass.rescue_claims(10, '1 day', '1 day', '1 day')")

    @app.task
    async def work(ctx: Context) -> None:
        if rescued:
            return
        if when == "before":
            await rescue(ctx.task_id)
        try:
            async with ctx.transaction() as connection:
                await connection.execute("INSERT INTO effects VALUES (1)")
                if when == "within":
                    await rescue(ctx.task_id)
        except LeaseLost as error:
            told.append(error)
            raise

    task = await done(app, await work.enqueue())

    assert len(told) == 1
    assert await effects(look) == 0
    assert task.status == "completed"
    await check_nothing_left(look)


async def test_a_lease_that_the_worker_no_longer_trusts_takes_everything_back(
    app: App, look: asyncpg.Connection
) -> None:
    """Although the database would still let it commit, and although it does not give way."""
    told: list[BaseException] = []
    over = asyncio.Event()

    @app.task
    async def work(ctx: Context) -> None:
        try:
            async with ctx.transaction() as connection:
                await connection.execute("INSERT INTO effects VALUES (1)")
                worker._slots.claims_lost(list(worker._slots._outstanding))
                with suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()
        except BaseException as error:
            told.append(error)
            raise
        finally:
            over.set()

    async with app.worker() as worker:
        handle = await work.enqueue()
        await asyncio.wait_for(over.wait(), 20)
        status = (await handle.get()).status

    assert [type(error) for error in told] == [LeaseLost]
    assert await effects(look) == 0
    assert status in (TaskState.CLAIMED, TaskState.RUNNING)


async def test_a_rescue_leaves_nothing_of_what_was_completed(
    app: App, look: asyncpg.Connection, sql_url: str
) -> None:
    """Its worker was lost before it could say so."""
    store = await app.store()
    await store.register(
        WorkerInfo(WORKER, "host", 1, "0.1", 10, ("a",), None), lease=timedelta(seconds=30)
    )
    handles = [await app.enqueue("a"), await app.enqueue("a")]
    request = ClaimRequest(WORKER, ("a",), 10, timedelta(seconds=30), timedelta(seconds=6))
    claim = (await store.claim(request)).claim
    assert claim is not None
    fence = Fence(claim.token, claim.tasks[0].id, claim.tasks[0].generation)
    await store.check_completion(fence)
    own = await asyncpg.connect(sql_url)
    async with own.transaction():
        guest = store.guest(own, is_async=True)
        await store.complete_within(guest, Completion(fence=fence, started_after=None))
    await own.close()

    await look.execute("UPDATE windlass.claim SET expires_at = clock_timestamp()")
    await store.rescue(10)

    assert [(await handle.get()).status for handle in handles] == ["completed", "pending"]
    for table in ("claim", "claim_task", "completed_within"):
        assert await look.fetch(f"SELECT FROM windlass.{table}") == [], table


async def test_a_task_that_came_back_within_its_claim_is_not_completed_by_the_old_attempt(
    app: App, look: asyncpg.Connection, sql_url: str
) -> None:
    store = await app.store()
    await store.register(
        WorkerInfo(WORKER, "host", 1, "0.1", 10, ("a",), None), lease=timedelta(seconds=30)
    )
    await app.enqueue("a")
    await app.enqueue("a")
    request = ClaimRequest(WORKER, ("a",), 10, timedelta(seconds=30), timedelta(seconds=6))
    claim = (await store.claim(request)).claim
    assert claim is not None
    returned, asked = (Fence(claim.token, one.id, one.generation) for one in claim.tasks)
    error = '{"type": "ValueError", "message": "no"}'
    await store.settle([Settlement(*returned, Outcome.RETRIED, delay=60.0, error=error)])
    await store.cancel(asked.task_id, "not wanted")
    own = await asyncpg.connect(sql_url)
    guest = store.guest(own, is_async=True)

    with pytest.raises(LeaseLost):
        async with own.transaction():
            await store.complete_within(guest, Completion(fence=returned, started_after=None))
    await store.check_completion(asked)
    async with own.transaction():
        await store.complete_within(guest, Completion(fence=asked, started_after=None))
    await own.close()

    states = [(await store.get(one.task_id)).status for one in (returned, asked)]
    assert states == [TaskState.SCHEDULED, TaskState.COMPLETED]
    assert await look.fetch("SELECT FROM windlass.cancel_request") == []


@pytest.mark.parametrize("isolation", ["read_committed", "repeatable_read", "serializable"])
async def test_an_enqueue_of_a_handler_whose_attempt_is_over_is_refused(
    app: App, look: asyncpg.Connection, sql_url: str, isolation: Any
) -> None:
    told: list[BaseException] = []
    over = asyncio.Event()

    @app.task
    async def child() -> None: ...

    @app.task
    async def work(ctx: Context, n: int) -> None:
        if n == 1:
            await over.wait()  # and keeps the claim of both alive
        elif ctx.attempt == 1:
            own = await asyncpg.connect(sql_url)
            token = await look.fetchval("SELECT token FROM windlass.claim")
            error = '{"type": "TimeoutError", "message": "too late"}'
            settlement = Settlement(token, UUID(ctx.task_id), 1, Outcome.RETRIED, error=error)
            try:
                async with own.transaction(isolation=isolation):
                    await own.execute("INSERT INTO effects VALUES (1)")  # from here on it sees this
                    assert await (await app.store()).settle([settlement]) == [Answer.APPLIED]
                    await child.options(connection=own).enqueue()
            except (LeaseLost, asyncpg.SerializationError) as refusal:
                told.append(refusal)
                raise
            finally:
                over.set()
                await own.close()

    await app.enqueue_many([work.call(0), work.call(1)])
    await app.run_worker(until_idle=True)

    expected = LeaseLost if isolation == "read_committed" else asyncpg.SerializationError
    assert [type(error) for error in told] == [expected]
    assert await look.fetch("SELECT FROM windlass.tasks WHERE type = 'child'") == []
    assert await effects(look) == 0


async def test_a_death_whose_commit_was_not_heard_of_is_not_taken_for_a_completion(
    app: App, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The settlement is repeated and answered "already", as that of a task that completed itself."""

    @app.task(retry=Retry(max_attempts=1))
    async def work(ctx: Context) -> None:
        raise ValueError("no")

    store = await app.store()
    settle = store.settle
    unheard: list[Any] = []

    async def settled(settlements: Any) -> Any:
        answers = await settle(settlements)
        if not unheard:
            unheard.append(answers)
            raise StoreUnavailable("the answer was lost")
        return answers

    monkeypatch.setattr(store, "settle", settled)
    metrics = Metrics(lambda: (0, 1), lambda: False)
    watch(metrics)
    task = await done(app, await work.enqueue())
    unwatch(metrics)

    assert unheard == [[Answer.APPLIED]]
    assert task.status == "dead"
    assert f"task.dead task_id={task.id}" in caplog.text
    assert 'windlass_tasks_ended_total{outcome="dead"' in metrics.page().body.decode()
