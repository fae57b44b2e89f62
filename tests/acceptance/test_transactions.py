"""An enqueue in the caller's own transaction: both commit, or neither does."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import asyncpg
import pytest

from acceptance.guests import CALLERS, Caller
from acceptance.quick import QUICK
from windlass import App, ConfigurationError, Handle, IdempotencyConflict, PayloadError
from windlass.runtime import fetcher


@pytest.fixture
async def app(database_url: str) -> AsyncIterator[App]:
    app = App(database_url, **QUICK)

    @app.task
    async def work(n: int) -> int:
        return n

    async with app:
        yield app
    await asyncio.to_thread(app.close_sync)  # what synchronous callers opened


@pytest.fixture
async def look(sql_url: str) -> AsyncIterator[asyncpg.Connection]:
    """Another session, that sees what is committed."""
    connection = await asyncpg.connect(sql_url)
    await connection.execute("CREATE TABLE orders (n integer)")
    yield connection
    await connection.close()


@pytest.fixture(params=list(CALLERS))
async def caller(
    request: pytest.FixtureRequest, look: asyncpg.Connection, database_url: str
) -> AsyncIterator[Caller]:
    async with CALLERS[request.param](database_url) as caller:
        yield caller


async def called(app: App, caller: Caller, call: Callable[[], Any]) -> Any:
    """Make a call in the caller's colour: a synchronous one belongs into a thread without a loop."""
    return await call() if caller.is_async else await asyncio.to_thread(call)


async def enqueue(app: App, caller: Caller, n: int, **options: Any) -> Handle:
    verb = app.enqueue if caller.is_async else app.enqueue_sync
    handle: Handle = await called(
        app, caller, lambda: verb("work", {"n": n}, connection=caller.connection, **options)
    )
    return handle


async def counted(look: asyncpg.Connection) -> tuple[int, int]:
    row = await look.fetchrow(
        "SELECT (SELECT count(*) FROM orders), (SELECT count(*) FROM windlass.tasks)"
    )
    return tuple(row)


async def test_nothing_is_there_before_the_commit_and_everything_after(
    app: App, caller: Caller, look: asyncpg.Connection
) -> None:
    await caller.execute("INSERT INTO orders VALUES (1)")
    handle = await enqueue(app, caller, 1, priority=7, tags=["t"], delay=0.001)
    assert handle.created
    assert await counted(look) == (0, 0)
    await caller.commit()

    assert await counted(look) == (1, 1)
    task = await handle.get()
    assert (task.priority, task.tags, task.payload) == (7, ("t",), {"n": 1})
    async with app.worker():
        assert await handle.result(timeout=10) == 1


@pytest.mark.parametrize("size", [10, 5000])
async def test_a_task_that_is_due_at_once_is_written_as_it_is_asked_for(
    app: App, caller: Caller, look: asyncpg.Connection, size: int
) -> None:
    payload = {"said": "it's \\ \" %s :text1 $1 é€ \n", "much": "x" * size}
    options: Any = {"queue": "a 'b'", "priority": 0, "max_attempts": 30_000}
    verb = app.enqueue if caller.is_async else app.enqueue_sync
    handle = await called(
        app, caller, lambda: verb("other", payload, connection=caller.connection, **options)
    )
    assert handle.created
    assert await counted(look) == (0, 0)
    await caller.commit()

    task = await handle.get()
    assert (task.queue, task.priority, task.max_attempts) == ("a 'b'", 0, 30_000)
    assert (task.payload, task.status, task.tags) == (payload, "pending", ())
    assert await counted(look) == (0, 1)


async def test_a_rollback_takes_both_back(
    app: App, caller: Caller, look: asyncpg.Connection
) -> None:
    await caller.execute("INSERT INTO orders VALUES (1)")
    await enqueue(app, caller, 1)
    await caller.rollback()

    assert await counted(look) == (0, 0)


async def test_many_are_enqueued_together(
    app: App, caller: Caller, look: asyncpg.Connection
) -> None:
    work = app.tasks[0]
    calls = [work.options(idempotency_key=str(n % 3)).call(n % 3) for n in range(5)]
    verb = app.enqueue_many if caller.is_async else app.enqueue_many_sync
    handles = await called(app, caller, lambda: verb(calls, connection=caller.connection))
    await caller.commit()

    assert [one.created for one in handles] == [True] * 3 + [False] * 2
    assert await counted(look) == (0, 3)


async def test_a_savepoint_takes_back_what_came_after_it(
    app: App, caller: Caller, look: asyncpg.Connection
) -> None:
    kept = await enqueue(app, caller, 1)
    await caller.execute("SAVEPOINT here")
    await enqueue(app, caller, 2)
    await caller.execute("ROLLBACK TO SAVEPOINT here")
    await caller.commit()

    assert await counted(look) == (0, 1)
    assert (await kept.get()).status == "pending"


async def test_a_key_that_is_known_leads_to_its_task_or_is_a_conflict(
    app: App, caller: Caller, look: asyncpg.Connection
) -> None:
    first = await app.enqueue("work", {"n": 1}, idempotency_key="k")
    again = await enqueue(app, caller, 1, idempotency_key="k")

    assert (again.id, again.created) == (first.id, False)
    with pytest.raises(IdempotencyConflict, match="task type 'work', idempotency key 'k'") as named:
        await enqueue(app, caller, 2, idempotency_key="k")
    assert named.value.index == 0
    await caller.rollback()


async def test_what_does_not_fit_is_refused_before_the_transaction_hears_of_it(
    app: App, caller: Caller, look: asyncpg.Connection
) -> None:
    await caller.execute("INSERT INTO orders VALUES (1)")
    with pytest.raises(PayloadError):
        await enqueue(app, caller, "x")  # type: ignore[arg-type]  # on purpose
    with pytest.raises(ConfigurationError, match="priority"):
        await enqueue(app, caller, 1, priority=101)
    await caller.commit()

    assert await counted(look) == (1, 0)


async def test_a_connection_of_the_other_colour_is_a_type_error(
    app: App, caller: Caller, look: asyncpg.Connection
) -> None:
    work = app.tasks[0].options(connection=caller.connection)
    wrong = asyncio.to_thread(work.enqueue_sync, 1) if caller.is_async else work.enqueue(1)
    with pytest.raises(TypeError, match="synchronous, and this call is not"):
        await wrong
    await caller.commit()

    assert await counted(look) == (0, 0)


@pytest.mark.needs_direct("there is no listener without one")
@pytest.mark.parametrize("first", ["worker", "enqueue"])
async def test_an_idle_worker_is_woken_by_the_commit(
    database_url: str,
    caller: Caller,
    look: asyncpg.Connection,
    monkeypatch: pytest.MonkeyPatch,
    first: str,
) -> None:
    """Also one that went idle after the enqueue, and before the commit."""
    monkeypatch.setattr(fetcher, "SHORTEST_POLL", 600)  # so that it does not look by itself
    app = App(database_url, **QUICK, poll=600)

    @app.task
    async def work(n: int) -> int:
        return n

    if first == "enqueue":
        handle = await enqueue(app, caller, 1)
    async with app.worker() as worker:
        await asyncio.wait_for(worker._idle_seen.wait(), 20)
        if first == "worker":
            handle = await enqueue(app, caller, 1)
        await caller.commit()
        assert await handle.result(timeout=20) == 1
    await asyncio.to_thread(app.close_sync)
