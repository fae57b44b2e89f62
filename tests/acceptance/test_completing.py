"""A handler ends its task in a transaction: its effects and its success are one commit."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import timedelta
from typing import Any
from uuid import UUID

import asyncpg
import psycopg
import pytest
from django.db import transaction as django_transaction

from acceptance.guests import ALONE, CALLERS, use_django
from acceptance.quick import QUICK
from windlass import App, ConfigurationError, Context, Handle, LeaseLost, Retry, TaskState
from windlass.model.task import (
    Answer,
    ClaimRequest,
    Completion,
    Fence,
    Outcome,
    Settlement,
    WorkerInfo,
)

WORKER = UUID(int=1)
PATIENT = {**QUICK, "lease": 30, "heartbeat": 10}


@pytest.fixture
async def app(database_url: str) -> AsyncIterator[App]:
    async with App(database_url, **PATIENT) as app:
        yield app


@pytest.fixture
async def look(app: App, sql_url: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(sql_url)
    await connection.execute("CREATE TABLE effects (n integer)")
    yield connection
    await connection.close()


async def effects(look: asyncpg.Connection) -> int:
    count: int = await look.fetchval("SELECT count(*) FROM effects")
    return count


async def check_nothing_left(look: asyncpg.Connection) -> None:
    for table in ("task", "claim", "claim_task", "completed_within", "running", "attempt"):
        assert await look.fetch(f"SELECT FROM windlass.{table}") == [], table


async def done(app: App, handle: Handle) -> Any:
    await app.run_worker(until_idle=True)
    return await handle.get()


async def test_what_is_done_commits_with_the_task(app: App, look: asyncpg.Connection) -> None:
    seen: list[Any] = []

    @app.task
    async def work(ctx: Context, n: int) -> str:
        async with ctx.transaction() as connection:
            await connection.execute("INSERT INTO effects VALUES ($1)", n)
            seen.append(await effects(look))
            ctx.complete({"n": n})
        seen.append(await effects(look))
        seen.append((await app.handle(ctx.task_id).get()).status)
        return "not kept"

    task = await done(app, await work.enqueue(7))

    assert seen == [0, 1, "completed"]
    assert (task.status, task.attempts, task.result) == ("completed", 1, {"n": 7})
    assert task.claimed_at <= task.started_at <= task.completed_at
    await check_nothing_left(look)


async def test_without_a_result_it_is_null(app: App, look: asyncpg.Connection) -> None:
    @app.task
    async def work(ctx: Context) -> str:
        async with ctx.transaction():
            pass
        return "not kept"

    task = await done(app, await work.enqueue())

    assert (task.status, task.result) == ("completed", None)


async def test_an_error_in_the_block_takes_everything_back(
    app: App, look: asyncpg.Connection
) -> None:
    @app.task(retry=Retry(max_attempts=2, base=0))
    async def work(ctx: Context) -> None:
        async with ctx.transaction() as connection:
            await connection.execute("INSERT INTO effects VALUES (1)")
            if ctx.attempt == 1:
                raise ValueError("not yet")

    task = await done(app, await work.enqueue())

    assert (task.status, task.attempts) == ("completed", 2)
    assert await effects(look) == 1
    await check_nothing_left(look)


async def test_an_error_of_the_database_is_the_drivers_own(
    app: App, look: asyncpg.Connection
) -> None:
    told: list[BaseException] = []
    await look.execute("ALTER TABLE effects ADD UNIQUE (n); INSERT INTO effects VALUES (1)")

    @app.task
    async def work(ctx: Context) -> None:
        for n in (1, 2):  # what was rolled back may be tried again
            try:
                async with ctx.transaction() as connection:
                    await connection.execute("INSERT INTO effects VALUES ($1)", n)
            except asyncpg.UniqueViolationError as error:
                told.append(error)

    task = await done(app, await work.enqueue())

    assert len(told) == 1
    assert (task.status, task.attempts) == ("completed", 1)
    assert await effects(look) == 2


async def test_what_is_raised_afterwards_is_told_and_changes_nothing(
    app: App, look: asyncpg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    @app.task
    async def work(ctx: Context) -> None:
        async with ctx.transaction() as connection:
            await connection.execute("INSERT INTO effects VALUES (1)")
        raise ValueError("too late")

    task = await done(app, await work.enqueue())

    assert (task.status, task.attempts, task.last_error) == ("completed", 1, None)
    assert f"handler.failed_late task_id={task.id}" in caplog.text
    await check_nothing_left(look)


async def test_it_happens_once_in_an_attempt(app: App, look: asyncpg.Connection) -> None:
    refused: list[str] = []

    @app.task
    async def work(ctx: Context) -> None:
        async with ctx.transaction():
            for again in (ctx.transaction(), ctx.transaction()):
                try:
                    async with again:
                        pass
                except Exception as error:
                    refused.append(str(error))
        try:
            async with ctx.transaction():
                pass
        except Exception as error:
            refused.append(str(error))

    task = await done(app, await work.enqueue())

    assert task.status == "completed"
    assert [said.partition("is ")[2] for said in refused] == [
        "completed once in an attempt, and was before"
    ] * 3


@pytest.mark.parametrize("ended", ["ROLLBACK", "COMMIT", "ROLLBACK; BEGIN", "COMMIT; BEGIN"])
async def test_a_transaction_that_is_ended_by_hand_completes_nothing(
    app: App, look: asyncpg.Connection, ended: str
) -> None:
    @app.task
    async def work(ctx: Context) -> None:
        async with ctx.transaction() as connection:
            await connection.execute("INSERT INTO effects VALUES (1)")
            await connection.execute(ended)

    task = await done(app, await work.enqueue())

    assert (task.status, task.attempts) == ("failed", 1)
    assert "was ended inside its block; leave COMMIT and ROLLBACK to" in str(task.last_error)


async def test_a_block_that_idles_for_longer_than_the_lease_says_so(
    database_url: str, sql_url: str
) -> None:
    look = await asyncpg.connect(sql_url)
    async with App(database_url, **QUICK) as app:

        @app.task(retry=1)
        async def work(ctx: Context) -> None:
            async with ctx.transaction() as connection:
                process = await connection.fetchval("SELECT pg_backend_pid()")
                # As the server does when it has idled: the driver hears of it by itself.
                await look.execute("SELECT pg_terminate_backend($1, 30000)", process)
                with suppress(asyncpg.InterfaceError):  # released, so that nobody may ask it
                    while not connection.is_closed():
                        await asyncio.sleep(0)

        task = await done(app, await work.enqueue())
    await look.close()

    assert "idled for longer than the lease (2 s), or somebody closed it" in str(task.last_error)


async def test_the_server_ends_a_block_that_idles_for_longer_than_the_lease(
    database_url: str, sql_url: str
) -> None:
    look = await asyncpg.connect(sql_url)
    await look.execute("CREATE TABLE effects (n integer)")
    async with App(database_url, **QUICK) as app:

        @app.task(retry=1)
        async def work(ctx: Context) -> None:
            ended = asyncio.Event()
            async with ctx.transaction() as connection:
                connection.add_termination_listener(lambda _: ended.set())
                await connection.execute("INSERT INTO effects VALUES (1)")
                await asyncio.wait_for(ended.wait(), 20)

        task = await done(app, await work.enqueue())

    assert "idled for longer than the lease (2 s), or somebody closed it" in str(task.last_error)
    assert await effects(look) == 0
    await look.close()


async def test_the_last_attempt_that_completes_on_its_own_connection_is_not_told_to_be_dead(
    app: App, look: asyncpg.Connection, sql_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    @app.task(retry=1)
    async def work(ctx: Context) -> None:
        own = await asyncpg.connect(sql_url)
        async with own.transaction():
            await ctx.complete(1, connection=own)
        await own.close()

    task = await done(app, await work.enqueue())

    assert task.status == "completed"
    assert "task.dead" not in caplog.text


LEAVE_BEHIND = """
SET search_path = pg_catalog; SET statement_timeout = '777ms'; CREATE TEMP TABLE mine (n integer);
SELECT pg_advisory_lock(1)
"""
FIND = """
SELECT current_setting('search_path'), current_setting('statement_timeout'),
    to_regclass('pg_temp.mine'), (SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()), pg_backend_pid()
"""


@pytest.mark.needs_direct("behind a pooler a session is nobody's")
async def test_what_a_handler_does_to_its_session_is_not_met_by_the_next(
    app: App, look: asyncpg.Connection
) -> None:
    found: list[Any] = []

    @app.task
    async def work(ctx: Context, leave: bool) -> None:
        async with ctx.transaction() as connection:
            found.append(tuple(await connection.fetchrow(FIND)))
            if leave:
                await connection.execute(LEAVE_BEHIND)

    for leave in (True, False):
        assert (await done(app, await work.enqueue(leave))).status == "completed"

    assert found[0] == found[1]


async def test_complete_belongs_into_the_block(app: App, look: asyncpg.Connection) -> None:
    @app.task(retry=1)
    async def work(ctx: Context) -> None:
        ctx.complete(1)

    task = await done(app, await work.enqueue())

    assert task.status == "dead"
    assert "belongs into `async with ctx.transaction():`" in task.last_error


async def test_a_result_that_cannot_be_kept_takes_everything_back(
    app: App, look: asyncpg.Connection
) -> None:
    @app.task
    async def work(ctx: Context) -> None:
        async with ctx.transaction() as connection:
            await connection.execute("INSERT INTO effects VALUES (1)")
            ctx.complete(float("nan"))

    task = await done(app, await work.enqueue())

    assert task.status == "failed"
    assert "nan" in task.last_error
    assert await effects(look) == 0


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


async def test_an_enqueue_of_the_handler_is_part_of_it(app: App, look: asyncpg.Connection) -> None:
    @app.task
    async def child() -> None: ...

    @app.task(retry=Retry(max_attempts=2, base=0))
    async def work(ctx: Context) -> None:
        async with ctx.transaction() as connection:
            await child.options(connection=connection).enqueue()
            if ctx.attempt == 1:
                raise ValueError("not yet")
        await child.enqueue()  # which the fence of a completed task does not refuse

    await work.enqueue()
    await app.run_worker(until_idle=True)

    assert await look.fetchval("SELECT count(*) FROM windlass.tasks WHERE type = 'child'") == 2


@pytest.mark.parametrize("kind", CALLERS)
@pytest.mark.parametrize("end", ["commit", "rollback"])
async def test_a_transaction_of_the_handlers_own_completes_its_task(
    app: App, look: asyncpg.Connection, database_url: str, kind: str, end: str
) -> None:
    opened = CALLERS[kind]

    @app.task(retry=Retry(max_attempts=1))
    async def work(ctx: Context) -> str:
        async with opened(database_url) as caller:
            await caller.execute("INSERT INTO effects VALUES (1)")
            if caller.is_async:
                await ctx.complete("kept", connection=caller.connection)
            else:
                complete = ctx.complete_sync
                await asyncio.to_thread(complete, "kept", connection=caller.connection)
            await getattr(caller, end)()
        return "not kept"

    task = await done(app, await work.enqueue())

    if end == "commit":
        assert (task.status, task.result, await effects(look)) == ("completed", "kept", 1)
    else:
        assert (task.status, await effects(look)) == ("dead", 0)
        assert "had not been committed" in task.last_error
    assert task.attempts == 1
    await check_nothing_left(look)


@pytest.mark.parametrize("kind", CALLERS)
async def test_it_may_be_the_first_statement_of_that_transaction(
    app: App, look: asyncpg.Connection, database_url: str, kind: str
) -> None:
    opened = CALLERS[kind]

    @app.task(retry=1)
    async def work(ctx: Context) -> None:
        async with opened(database_url) as caller:
            if caller.is_async:
                await ctx.complete("kept", connection=caller.connection)
            else:
                complete = ctx.complete_sync
                await asyncio.to_thread(complete, "kept", connection=caller.connection)
            await caller.execute("INSERT INTO effects VALUES (1)")
            await caller.commit()

    task = await done(app, await work.enqueue())

    assert (task.status, task.result, await effects(look)) == ("completed", "kept", 1)
    await check_nothing_left(look)


@pytest.mark.parametrize("runs_in", ["thread", "loop"])
async def test_a_synchronous_connection_is_refused_at_once_and_not_when_it_is_awaited(
    app: App, look: asyncpg.Connection, database_url: str, runs_in: Any
) -> None:
    def forget_sync(ctx: Context) -> str:
        with psycopg.connect(database_url) as own:
            own.execute("INSERT INTO effects VALUES (1)")
            ctx.complete(1, connection=own)  # type: ignore[unused-coroutine]  # on purpose
        return "returned"

    async def forget_sync_too(ctx: Context) -> str:
        return forget_sync(ctx)

    handler = forget_sync if runs_in == "thread" else forget_sync_too
    task = await done(app, await app.task(retry=1)(handler).enqueue())

    assert (task.status, await effects(look)) == ("dead", 0)
    assert "use its twin with _sync (enqueue_sync, ctx.complete_sync)" in task.last_error


async def test_a_thread_that_completes_on_an_asynchronous_connection_is_told_so(
    app: App, look: asyncpg.Connection, database_url: str
) -> None:
    own = await asyncpg.connect(database_url)

    @app.task(retry=1)
    def work(ctx: Context) -> str:
        ctx.complete(1, connection=own)  # type: ignore[unused-coroutine]  # on purpose
        return "returned"

    @app.task(retry=1)
    def with_a_loop_of_its_own(ctx: Context) -> None:
        async def complete() -> None:
            await ctx.complete(1, connection=own)

        asyncio.run(complete())

    for handler in (work, with_a_loop_of_its_own):
        task = await done(app, await handler.enqueue())
        assert task.status == "dead"
        assert "use ctx.complete_sync() and a synchronous connection" in task.last_error
    await own.close()


async def test_a_completion_that_is_not_awaited_fails_the_task_for_good(
    app: App, look: asyncpg.Connection, database_url: str
) -> None:
    """Its effects are committed without it: another attempt would have them twice."""

    @app.task
    async def work(ctx: Context) -> str:
        own = await asyncpg.connect(database_url)
        async with own.transaction():
            await own.execute("INSERT INTO effects VALUES (1)")
            ctx.complete(1, connection=own)  # type: ignore[unused-coroutine]  # on purpose
        await own.close()
        return "returned"

    task = await done(app, await work.enqueue())

    assert (task.status, task.attempts, await effects(look)) == ("failed", 1, 1)
    assert "called without `await`" in task.last_error
    await check_nothing_left(look)


async def test_an_error_after_a_completion_that_is_not_awaited_is_the_handlers_own(
    app: App, look: asyncpg.Connection, database_url: str
) -> None:
    @app.task(retry=1)
    async def work(ctx: Context) -> None:
        own = await asyncpg.connect(database_url)
        try:
            async with own.transaction():
                ctx.complete(1, connection=own)  # type: ignore[unused-coroutine]  # on purpose
                raise ValueError("taken back")
        finally:
            await own.close()

    task = await done(app, await work.enqueue())

    assert (task.status, task.last_error) == ("dead", "taken back")


async def test_a_completion_that_is_awaited_after_one_that_is_not_counts(
    app: App, look: asyncpg.Connection, database_url: str
) -> None:
    @app.task(retry=1)
    async def work(ctx: Context) -> None:
        own = await asyncpg.connect(database_url)
        async with own.transaction():
            ctx.complete(1, connection=own)  # type: ignore[unused-coroutine]  # on purpose
            await ctx.complete(2, connection=own)
        await own.close()

    task = await done(app, await work.enqueue())

    assert (task.status, task.result) == ("completed", 2)


async def test_a_coroutine_is_told_to_await_the_twin_of_complete_sync(
    app: App, look: asyncpg.Connection, sql_url: str
) -> None:
    @app.task(retry=1)
    async def work(ctx: Context) -> None:
        with psycopg.connect(sql_url) as own:
            ctx.complete_sync(1, connection=own)

    async with asyncio.timeout(30):
        task = await done(app, await work.enqueue())

    said = "ctx.complete_sync() would block the running event loop; use: await ctx.complete()"
    assert (task.status, task.last_error) == ("dead", said)


async def test_a_thread_completes_on_its_own_connection(
    app: App, look: asyncpg.Connection, database_url: str
) -> None:
    @app.task
    def work(ctx: Context) -> None:
        with psycopg.connect(database_url) as connection:
            connection.execute("INSERT INTO effects VALUES (1)")
            ctx.complete_sync(5, connection=connection)

    task = await done(app, await work.enqueue())

    assert (task.status, task.result, await effects(look)) == ("completed", 5, 1)
    await check_nothing_left(look)


async def test_a_transaction_that_is_still_open_when_the_handler_returns_is_waited_for(
    app: App, look: asyncpg.Connection, database_url: str
) -> None:
    connection = await asyncpg.connect(database_url)
    begun = connection.transaction()
    await begun.start()
    returned = asyncio.Event()

    @app.task
    async def work(ctx: Context) -> None:
        await connection.execute("INSERT INTO effects VALUES (1)")
        await ctx.complete("kept", connection=connection)
        returned.set()

    async with app.worker():
        handle = await work.enqueue()
        await asyncio.wait_for(returned.wait(), 10)
        while not await look.fetch("SELECT FROM pg_locks WHERE NOT granted"):
            await asyncio.sleep(0.01)
        assert (await handle.get()).status in (TaskState.CLAIMED, TaskState.RUNNING)
        await begun.commit()
        assert await handle.result(timeout=10) == "kept"
    await connection.close()

    await check_nothing_left(look)


@pytest.mark.parametrize("isolation", ["repeatable_read", "serializable"])
async def test_heartbeats_do_not_disturb_a_strict_transaction(
    app: App, look: asyncpg.Connection, database_url: str, isolation: str
) -> None:
    connection = await asyncpg.connect(database_url)

    @app.task
    async def work(ctx: Context) -> None:
        async with connection.transaction(isolation=isolation):
            await connection.execute("INSERT INTO effects VALUES (1)")
            await look.execute("UPDATE windlass.claim SET expires_at = expires_at + interval '1 s'")
            await ctx.complete(None, connection=connection)
            await look.execute("UPDATE windlass.claim SET expires_at = expires_at + interval '1 s'")

    task = await done(app, await work.enqueue())
    await connection.close()

    assert (task.status, task.attempts, await effects(look)) == ("completed", 1, 1)
    await check_nothing_left(look)


NO_TRANSACTION = "needs a transaction, and on this connection none is open"


@pytest.mark.parametrize("kind", ALONE)
async def test_a_connection_on_which_each_statement_commits_is_refused(
    app: App, look: asyncpg.Connection, database_url: str, kind: str
) -> None:
    opened = ALONE[kind]
    refused: list[str] = []

    @app.task(retry=1)
    async def work(ctx: Context) -> None:
        async with opened(database_url) as caller:
            try:
                if caller.is_async:
                    await ctx.complete(5, connection=caller.connection)
                else:
                    await asyncio.to_thread(ctx.complete_sync, 5, connection=caller.connection)
            except ConfigurationError as error:
                refused.append(str(error))

    task = await done(app, await work.enqueue())

    assert [NO_TRANSACTION in said for said in refused] == [True]
    assert (task.status, task.result) == ("completed", None)  # by what it returned


async def test_a_refused_connection_may_be_given_again_with_a_transaction(
    app: App, look: asyncpg.Connection, database_url: str
) -> None:
    @app.task(retry=1)
    async def work(ctx: Context) -> None:
        own = await asyncpg.connect(database_url)
        with suppress(ConfigurationError):
            await ctx.complete(1, connection=own)
        async with own.transaction():
            await ctx.complete(2, connection=own)
        await own.close()

    task = await done(app, await work.enqueue())

    assert (task.status, task.result) == ("completed", 2)


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_block_on_a_connection_that_else_commits_each_statement_completes_its_task(
    app: App, look: asyncpg.Connection, database_url: str, is_async: bool
) -> None:
    @app.task(name="work", retry=1)
    def work(ctx: Context) -> None:
        with psycopg.connect(database_url, autocommit=True) as own, own.transaction():
            own.execute("INSERT INTO effects VALUES (1)")
            ctx.complete_sync("kept", connection=own)

    @app.task(name="work_async", retry=1)
    async def work_async(ctx: Context) -> None:
        connecting = psycopg.AsyncConnection.connect(database_url, autocommit=True)
        async with await connecting as own, own.transaction():
            await own.execute("INSERT INTO effects VALUES (1)")
            await ctx.complete("kept", connection=own)

    task = await done(app, await (work_async if is_async else work).enqueue())

    assert (task.status, task.result, await effects(look)) == ("completed", "kept", 1)
    await check_nothing_left(look)


async def test_django_completes_in_its_atomic_block_and_not_outside_of_it(
    app: App, look: asyncpg.Connection, database_url: str
) -> None:
    connections = use_django(database_url)
    refused: list[str] = []

    @app.task(retry=1)
    def work(ctx: Context) -> None:
        connection = connections["default"]
        try:
            try:
                ctx.complete_sync(1, connection=connection)
            except ConfigurationError as error:
                refused.append(str(error))
            with django_transaction.atomic():
                connection.cursor().execute("INSERT INTO effects VALUES (1)")
                ctx.complete_sync(2, connection=connection)
        finally:
            connections.close_all()

    task = await done(app, await work.enqueue())

    assert (task.status, task.result, await effects(look)) == ("completed", 2, 1)
    assert [NO_TRANSACTION in said for said in refused] == [True]


async def test_beside_others_of_its_claim(app: App, look: asyncpg.Connection) -> None:
    @app.task
    async def work(ctx: Context, n: int) -> int:
        if n % 2:
            async with ctx.transaction() as connection:
                await connection.execute("INSERT INTO effects VALUES ($1)", n)
                ctx.complete(n)
        return n

    handles = await app.enqueue_many([work.call(n) for n in range(40)])
    await app.run_worker(until_idle=True)

    assert [await handle.result(timeout=1) for handle in handles] == list(range(40))
    assert await effects(look) == 20
    await check_nothing_left(look)


async def test_in_memory_there_are_no_transactions() -> None:
    async with App("memory:", **QUICK) as app:

        @app.task(retry=1)
        async def work(ctx: Context) -> None:
            async with ctx.transaction():
                pass

        task = await done(app, await work.enqueue())

    assert task.status == "dead"
    assert "ctx.transaction() and ctx.complete() need PostgreSQL" in task.last_error
