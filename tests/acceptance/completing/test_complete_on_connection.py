"""`ctx.complete(connection=)`: a transaction of the handler's own, by every library."""

import asyncio
from contextlib import suppress
from typing import Any

import asyncpg
import psycopg
import pytest
from django.db import transaction as django_transaction

from acceptance.completing.effects import check_nothing_left, done, effects
from acceptance.guests import ALONE, CALLERS, use_django
from windlass import App, ConfigurationError, Context, Retry, TaskState


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

    assert (task.status, await effects(look)) == ("failed", 0)
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
        assert task.status == "failed"
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


@pytest.mark.parametrize("runs_in", ["thread", "loop"])
async def test_what_is_raised_after_the_commit_is_told_and_changes_nothing(
    app: App,
    look: asyncpg.Connection,
    database_url: str,
    caplog: pytest.LogCaptureFixture,
    runs_in: str,
) -> None:
    async def in_loop(ctx: Context) -> None:
        async with await psycopg.AsyncConnection.connect(database_url) as connection:
            await connection.execute("INSERT INTO effects VALUES (1)")
            await ctx.complete(5, connection=connection)
        raise ValueError("too late")

    def in_thread(ctx: Context) -> None:
        with psycopg.connect(database_url) as connection:
            connection.execute("INSERT INTO effects VALUES (1)")
            ctx.complete_sync(5, connection=connection)
        raise ValueError("too late")

    app.task(in_loop)
    app.task(in_thread)
    task = await done(app, await app.enqueue(f"in_{runs_in}"))

    assert (task.status, task.result, await effects(look)) == ("completed", 5, 1)
    assert f"handler.failed_late task_id={task.id}" in caplog.text
    assert "task.dead" not in caplog.text


async def test_a_completion_in_a_savepoint_is_taken_back_with_it_and_the_task_runs_again(
    app: App, look: asyncpg.Connection, database_url: str
) -> None:
    @app.task(retry=Retry(max_attempts=2, base=0))
    def work(ctx: Context) -> None:
        with psycopg.connect(database_url) as connection:
            connection.execute("INSERT INTO effects VALUES (1)")
            with connection.transaction() as savepoint:
                ctx.complete_sync(None, connection=connection)
                if ctx.attempt == 1:
                    raise psycopg.Rollback(savepoint)

    task = await done(app, await work.enqueue())

    assert (task.status, task.attempts, await effects(look)) == ("completed", 2, 2)
    assert "a savepoint around the call had been rolled back" in task.errors[0]["message"]
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
