"""`ctx.transaction()`: what a handler does and its success are one commit."""

import asyncio
from contextlib import suppress
from typing import Any

import asyncpg
import pytest

from acceptance.completing.effects import check_nothing_left, done, effects
from acceptance.quick import QUICK
from windlass import App, Context, Retry, StoreUnavailable, TaskFailed


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


async def test_a_block_that_could_not_begin_may_be_tried_again(
    app: App, look: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await app.store()
    check = store.check_completion
    failed: list[Any] = []

    async def unavailable_once(fence: Any) -> None:
        if not failed:
            failed.append(fence)
            raise StoreUnavailable("no connection to spare")
        await check(fence)

    monkeypatch.setattr(store, "check_completion", unavailable_once)

    @app.task(retry=Retry(max_attempts=1))
    async def work(ctx: Context) -> None:
        with suppress(StoreUnavailable):
            async with ctx.transaction():
                pass
        async with ctx.transaction() as connection:
            await connection.execute("INSERT INTO effects VALUES (1)")

    task = await done(app, await work.enqueue())

    assert len(failed) == 1
    assert (task.status, await effects(look)) == ("completed", 1)


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

    assert task.status == "failed"
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


async def test_a_handler_in_a_thread_is_told_what_to_use(app: App) -> None:
    @app.task(retry=1)
    def charge(ctx: Context) -> None:
        with ctx.transaction():  # type: ignore[attr-defined]  # wrong on purpose
            pass

    handle = await charge.enqueue()
    await app.run_worker(until_idle=True)

    with pytest.raises(TaskFailed, match=r"ctx\.complete_sync"):
        await handle.result(timeout=5)


async def test_in_memory_there_are_no_transactions() -> None:
    async with App("memory:", **QUICK) as app:

        @app.task(retry=1)
        async def work(ctx: Context) -> None:
            async with ctx.transaction():
                pass

        task = await done(app, await work.enqueue())

    assert task.status == "failed"
    assert "ctx.transaction() and ctx.complete() need PostgreSQL" in task.last_error
