"""What a caller's connection cannot do, and what its own settings mean for an enqueue."""

import asyncio
import re
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import msgspec
import psycopg
import pytest
import sqlalchemy
import sqlalchemy.exc
from django.db import transaction as django_transaction
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import DeclarativeBase, Session, scoped_session, sessionmaker

from acceptance.guests import ALONE, CALLERS, Caller, sqlalchemy_url, use_django
from acceptance.quick import QUICK
from windlass import App, ConfigurationError, Handle, IdempotencyConflict, Task
from windlass.client.asking import Call
from windlass.model.task import Enqueued, Fence, NewTask
from windlass.store.postgres import enqueueing, guests


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
def work(app: App) -> Task[[int], Any]:
    return app.tasks[0]


async def left(app: App) -> int:
    return sum(sum(queue.counts.values()) for queue in await (await app.store()).queues())


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
async def test_a_failure_to_serialise_is_the_drivers_own(
    app: App, work: Task[[int], Any], database_url: str, level: str
) -> None:
    """The caller repeats its transaction, as it does for its own statements."""
    connection = await asyncpg.connect(
        database_url, statement_cache_size=0
    )  # there may be a pooler
    within = work.options(idempotency_key="k", connection=connection)
    begun = connection.transaction(isolation=level.lower().replace(" ", "_"))
    await begun.start()
    await connection.execute("SELECT count(*) FROM windlass.task_type")  # it sees no later than now
    first = await work.options(idempotency_key="k").enqueue(1)
    with pytest.raises(asyncpg.SerializationError):
        await within.enqueue(1)
    await begun.rollback()
    async with connection.transaction(isolation=level.lower().replace(" ", "_")):
        again = await within.enqueue(1)
    await connection.close()

    assert (again.id, again.created) == (first.id, False)


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
async def test_a_strict_transaction_enqueues_beside_others(
    app: App, work: Task[[int], Any], database_url: str, level: str
) -> None:
    def enqueue() -> None:
        with psycopg.connect(database_url) as connection:
            connection.isolation_level = getattr(psycopg.IsolationLevel, level.replace(" ", "_"))
            connection.execute("SELECT count(*) FROM windlass.task_type")
            barrier.wait()
            for n in range(5):
                work.options(connection=connection).enqueue_sync(n)

    await work.enqueue(0)  # the first of its kind is listed, which all of them would do
    barrier = threading.Barrier(3)
    await asyncio.gather(*(asyncio.to_thread(enqueue) for _ in range(3)))
    assert await left(app) == 16
    await app.run_worker(until_idle=True)
    assert await left(app) == 0


async def test_where_each_statement_commits_an_enqueue_does_too(
    app: App, work: Task[[int], Any], database_url: str
) -> None:
    def enqueue() -> None:
        with psycopg.connect(database_url, autocommit=True) as connection:
            work.options(connection=connection).enqueue_sync(1)
            with connection.transaction(force_rollback=True):
                work.options(connection=connection).enqueue_sync(2)

    await asyncio.to_thread(enqueue)
    assert await left(app) == 1


async def enqueue_all(app: App, caller: Caller, calls: Sequence[Call]) -> list[Handle]:
    if caller.is_async:
        return await app.enqueue_many(calls, connection=caller.connection)
    enqueue = app.enqueue_many_sync
    return await asyncio.to_thread(enqueue, calls, connection=caller.connection)


@pytest.mark.parametrize("kind", ALONE)
async def test_a_call_of_several_statements_is_all_or_nothing_there_too(
    app: App, work: Task[[int], Any], database_url: str, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(enqueueing, "GUEST_CHUNK_TASKS", 2)
    await work.options(idempotency_key="k").enqueue(0)
    good = [work.call(n) for n in range(5)]
    bad = [*good, work.options(idempotency_key="k").call(9)]

    async with ALONE[kind](database_url) as caller:
        with pytest.raises(IdempotencyConflict, match="item 5: "):
            await enqueue_all(app, caller, bad)
        assert await left(app) == 1
        await enqueue_all(app, caller, [work.call(6)])  # on which no transaction was left open
        assert await left(app) == 2
        await enqueue_all(app, caller, good)
        assert await left(app) == 7


CANCELLED_AT = ["BEGIN", "enqueue", "COMMIT"]
GUESTS = (guests._AsyncPsycopg, guests._Asyncpg, guests._AsyncSqlalchemy)


@pytest.mark.parametrize("kind", [kind for kind in ALONE if "async" in kind])
@pytest.mark.parametrize("at", CANCELLED_AT)
async def test_a_call_of_several_statements_that_is_cancelled_leaves_no_transaction_open(
    app: App,
    work: Task[[int], Any],
    database_url: str,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    at: str,
) -> None:
    """What the caller does next on the connection would be lost with it."""
    monkeypatch.setattr(enqueueing, "GUEST_CHUNK_TASKS", 2)

    def cancelling(fetch: Any) -> Any:
        async def fetch_and_cancel(guest: Any, statement: str, *texts: Any) -> Any:
            rows = await fetch(guest, statement, *texts)
            if at in statement:
                running = asyncio.current_task()
                assert running is not None
                running.cancel()
                await asyncio.sleep(0)
            return rows

        return fetch_and_cancel

    async with ALONE[kind](database_url) as caller:
        with monkeypatch.context() as patched:
            for each in GUESTS:
                patched.setattr(each, "fetch", cancelling(each.fetch))
            with pytest.raises(asyncio.CancelledError):
                await enqueue_all(app, caller, [work.call(n) for n in range(5)])
        running = asyncio.current_task()
        assert running is not None
        running.uncancel()

        before = await left(app)
        assert before == (5 if at == "COMMIT" else 0)
        await enqueue_all(app, caller, [work.call(6)])
        assert await left(app) == before + 1


@pytest.mark.parametrize("kind", ALONE)
@pytest.mark.parametrize("error", [OSError("gone"), asyncio.CancelledError()])
async def test_a_connection_that_cannot_be_rolled_back_is_closed(
    app: App,
    work: Task[[int], Any],
    database_url: str,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    error: BaseException,
) -> None:
    monkeypatch.setattr(enqueueing, "GUEST_CHUNK_TASKS", 2)
    calls = [*(work.call(n) for n in range(5)), work.options(idempotency_key="k").call(9)]
    await work.options(idempotency_key="k").enqueue(0)

    def refusing(fetch: Any) -> Any:
        async def fetch_or_refuse(guest: Any, statement: str, *texts: Any) -> Any:
            if statement == "ROLLBACK":
                raise error
            return await fetch(guest, statement, *texts)

        return fetch_or_refuse

    async with ALONE[kind](database_url) as caller:
        expected = IdempotencyConflict if isinstance(error, Exception) else type(error)
        with monkeypatch.context() as patched:
            for each in (guests._Psycopg, guests._Sqlalchemy, *GUESTS):
                patched.setattr(each, "fetch", refusing(each.fetch))
            with pytest.raises(expected):
                await enqueue_all(app, caller, calls)
        there = 1
        # Either it is closed, or its library has opened another one.
        with suppress(
            psycopg.OperationalError, asyncpg.InterfaceError, sqlalchemy.exc.SQLAlchemyError
        ):
            there += len(await enqueue_all(app, caller, [work.call(6)]))
        assert await left(app) == there


async def test_a_connection_that_is_busy_is_left_to_what_it_does(
    app: App, work: Task[[int], Any], sql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(enqueueing, "GUEST_CHUNK_TASKS", 2)
    connection, other = await asyncpg.connect(sql_url), await asyncpg.connect(sql_url)
    await other.execute("SELECT pg_advisory_lock(77)")
    busy = asyncio.create_task(connection.fetchval("SELECT 'done' FROM pg_advisory_lock(77)"))
    await asyncio.sleep(0)

    with pytest.raises(asyncpg.InterfaceError, match="another operation is in progress"):
        await app.enqueue_many([work.call(n) for n in range(5)], connection=connection)
    await other.execute("SELECT pg_advisory_unlock(77)")

    assert await busy == "done"
    await connection.close()
    await other.close()


@pytest.mark.parametrize("kind", CALLERS)
async def test_a_call_of_several_statements_may_be_the_first_of_a_transaction(
    app: App, work: Task[[int], Any], database_url: str, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(enqueueing, "GUEST_CHUNK_TASKS", 2)
    async with CALLERS[kind](database_url) as caller:
        for end, kept in ((caller.rollback, 0), (caller.commit, 5)):
            handles = await enqueue_all(app, caller, [work.call(n) for n in range(5)])
            assert [handle.created for handle in handles] == [True] * 5
            assert await left(app) == 0
            await end()
            assert await left(app) == kept
            if kind.startswith("asyncpg"):
                break  # whose transactions are begun by hand


async def test_a_connection_that_is_not_started_is_refused_by_its_library(
    app: App, work: Task[[int], Any], database_url: str
) -> None:
    engine = create_async_engine(sqlalchemy_url(database_url, "asyncpg"))
    with pytest.raises(sqlalchemy.exc.InvalidRequestError, match="has not been started"):
        await work.options(connection=engine.connect()).enqueue(1)
    await engine.dispose()


class SizedGuest:
    """A connection that notes how much it is asked to carry at once."""

    is_async = True

    def __init__(self) -> None:
        self.sizes: list[tuple[int, int]] = []  # tasks, bytes

    async def commits_by_itself(self) -> bool:
        return False

    async def fetch(self, statement: str, *texts: str | None) -> Sequence[Sequence[Any]]:
        assert texts[0] is not None
        ids = [(item["id"],) for item in msgspec.json.decode(texts[0])]
        self.sizes.append((len(ids), len(texts[0].encode())))
        return ids

    async def discard(self) -> None:
        raise AssertionError("nothing was wrong")


class AskedGuest(SizedGuest):
    """A connection that notes which function it is to call."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    async def fetch(self, statement: str, *texts: str | None) -> Sequence[Sequence[Any]]:
        self.asked += re.findall(r"SELECT windlass\.(\w+)", statement)
        return (
            [(str(MADE),)] if self.asked == ["enqueue"] else await super().fetch(statement, *texts)
        )


MADE = UUID(int=5)
PLAIN = NewTask(UUID(int=6), "work", '{"n":1}')


@pytest.mark.parametrize(
    ("task", "fence", "called"),
    [
        (PLAIN, None, "enqueue"),
        (PLAIN._replace(queue="bulk", priority=0, max_attempts=1), None, "enqueue"),
        (PLAIN._replace(delay=1e-9), None, "enqueue_many"),
        (PLAIN._replace(at=datetime(1980, 1, 1, tzinfo=UTC)), None, "enqueue_many"),
        (PLAIN._replace(idempotency_key="k"), None, "enqueue_many"),
        (PLAIN._replace(tags=("a",)), None, "enqueue_many"),
        (PLAIN._replace(retention=timedelta()), None, "enqueue_many"),
        (PLAIN, Fence(MADE, MADE, 1), "enqueue_many"),
    ],
)
async def test_only_a_plain_task_gets_its_id_from_the_server(
    app: App, task: NewTask, fence: Fence | None, called: str
) -> None:
    store = await app.store()
    guest = AskedGuest()
    answers = await store.enqueue_within(guest, [task], fence=fence)

    assert guest.asked == [called]
    assert answers == [Enqueued(MADE if called == "enqueue" else task.id, created=True)]
    await store.enqueue_within(guest, [task, task._replace(id=UUID(int=7))], fence=fence)
    assert guest.asked == [called, "enqueue_many"]


@pytest.mark.parametrize(
    ("number", "task"),
    [
        (25_000, NewTask(UUID(int=0), "work", "{}")),
        (700, NewTask(UUID(int=0), "work", f'{{"s":"{"€" * 100_000}"}}')),
        (
            9_000,
            NewTask(
                UUID(int=0),
                "t" * 200,
                "{}",
                "q" * 200,
                10,
                4,
                0.5,
                None,
                "k" * 200,
                ("g" * 200,) * 50,
            ),
        ),
    ],
    ids=["many", "large", "named"],
)
async def test_no_statement_of_a_large_call_is_larger_than_one_value_can_be(
    app: App, number: int, task: NewTask
) -> None:
    """Among jsonb's limits is one of 256 MB, and what is JSON may be six times as large there."""
    store = await app.store()
    guest = SizedGuest()
    await store.enqueue_within(guest, [task._replace(id=UUID(int=n)) for n in range(number)])

    assert sum(tasks for tasks, _ in guest.sizes) == number
    assert max(tasks for tasks, _ in guest.sizes) <= 10_000
    assert max(size for _, size in guest.sizes) <= 32 << 20
    assert len(guest.sizes) < 10


async def test_the_cursors_of_the_caller_may_be_any(
    app: App, work: Task[[int], Any], database_url: str
) -> None:
    def enqueue() -> None:
        with psycopg.connect(database_url, cursor_factory=psycopg.RawCursor) as connection:
            work.options(connection=connection).enqueue_sync(1)

    async def enqueue_too() -> None:
        connecting = psycopg.AsyncConnection.connect(
            database_url, cursor_factory=psycopg.AsyncRawCursor
        )
        async with await connecting as connection:
            await work.options(connection=connection).enqueue(2)

    await asyncio.to_thread(enqueue)
    await enqueue_too()

    assert await left(app) == 2


async def test_an_enqueue_may_be_part_of_a_pipeline(
    app: App, work: Task[[int], Any], database_url: str
) -> None:
    def enqueue() -> None:
        with psycopg.connect(database_url) as connection, connection.pipeline():
            handles = [work.options(connection=connection).enqueue_sync(n) for n in range(2)]
            assert all(handle.created for handle in handles)

    async def enqueue_too() -> None:
        connecting = psycopg.AsyncConnection.connect(database_url)
        async with await connecting as connection, connection.pipeline():
            await work.options(connection=connection).enqueue(2)

    await asyncio.to_thread(enqueue)
    await enqueue_too()

    assert await left(app) == 3


async def test_nested_blocks_are_taken_back_by_themselves(
    app: App, work: Task[[int], Any], database_url: str
) -> None:
    def enqueue() -> None:
        engine = sqlalchemy.create_engine(sqlalchemy_url(database_url, "psycopg"))
        sessions = scoped_session(sessionmaker(engine))
        with sessions.begin():
            work.options(connection=sessions).enqueue_sync(1)
            with suppress(ZeroDivisionError), sessions.begin_nested():
                work.options(connection=sessions).enqueue_sync(2)
                raise ZeroDivisionError
            with sessions.begin_nested():
                work.options(connection=sessions()).enqueue_sync(3)
        sessions.remove()
        engine.dispose()

    await asyncio.to_thread(enqueue)
    assert await left(app) == 2


async def test_django_enqueues_in_its_atomic_block(
    app: App, work: Task[[int], Any], database_url: str
) -> None:
    connections = use_django(database_url)
    from django.db import DEFAULT_DB_ALIAS, connection

    def enqueue() -> None:
        within = work.options(connection=connection)
        try:
            with django_transaction.atomic():
                work.options(connection=connections[DEFAULT_DB_ALIAS]).enqueue_sync(1)
                with suppress(ZeroDivisionError), django_transaction.atomic():
                    within.enqueue_sync(2)
                    raise ZeroDivisionError
                keyed = within.options(idempotency_key="k")
                with suppress(IdempotencyConflict), django_transaction.atomic():
                    keyed.enqueue_sync(3)
                    keyed.enqueue_sync(4)
            within.enqueue_sync(5)
        finally:
            connections.close_all()

    await asyncio.to_thread(enqueue)
    assert await left(app) == 2


class Mapped(DeclarativeBase): ...


def test_a_session_of_several_databases_is_refused_with_the_way_out(
    app: App, database_url: str
) -> None:
    engine = sqlalchemy.create_engine(sqlalchemy_url(database_url, "psycopg"))
    with Session(binds={Mapped: engine}) as session:
        with pytest.raises(TypeError, match=r"session\.connection\(bind_arguments="):
            app.enqueue_sync("work", {"n": 1}, connection=session)

        own = session.connection(bind_arguments={"bind": engine})
        handle = app.enqueue_sync("work", {"n": 1}, connection=own)
        session.commit()
    engine.dispose()

    assert handle.get_sync().status == "pending"


async def test_what_is_no_connection_is_named(app: App, work: Task[[int], Any]) -> None:
    with pytest.raises(TypeError, match=r"connection is of type builtins.str; give one of psycopg"):
        await work.options(connection="postgresql://host/db").enqueue(1)
    engine = sqlalchemy.create_engine("sqlite://")
    with engine.connect() as c, pytest.raises(TypeError, match="a database of sqlite"):
        await asyncio.to_thread(work.options(connection=c).enqueue_sync, 1)
    with Session(engine) as c, pytest.raises(TypeError, match="a database of sqlite"):
        await asyncio.to_thread(work.options(connection=c).enqueue_sync, 1)
    engine.dispose()


async def test_a_connection_to_another_database_is_told_so(
    work: Task[[int], Any], empty_database_url: str
) -> None:
    connection = await asyncpg.connect(empty_database_url)
    with pytest.raises(ConfigurationError, match="give a connection to the database of the app"):
        await work.options(connection=connection).enqueue(1)
    await connection.close()


async def test_a_role_without_the_right_is_told_so(work: Task[[int], Any], sql_url: str) -> None:
    connection = await asyncpg.connect(sql_url)
    await connection.execute("CREATE ROLE poor")
    try:
        await connection.execute("SET ROLE poor")
        with pytest.raises(ConfigurationError, match=r"lacks a right.* grant USAGE on it"):
            await work.options(connection=connection).enqueue(1)
        await connection.execute(
            "RESET ROLE; GRANT USAGE ON SCHEMA windlass TO poor; SET ROLE poor"
        )
        with pytest.raises(ConfigurationError, match=r"function enqueue; .* grant EXECUTE on it"):
            await work.options(connection=connection).enqueue(1)
    finally:
        await connection.execute("RESET ROLE; DROP OWNED BY poor; DROP ROLE poor")
        await connection.close()


async def test_a_role_that_may_call_the_functions_for_sql_may_enqueue(
    app: App, work: Task[[int], Any], sql_url: str
) -> None:
    connection = await asyncpg.connect(sql_url)
    role = f"shop_{uuid4().hex}"
    await connection.execute(
        f"CREATE ROLE {role}; GRANT USAGE ON SCHEMA windlass TO {role}; "
        "GRANT EXECUTE ON FUNCTION windlass.enqueue, windlass.enqueue_many, windlass.cancel "
        f"TO {role}"
    )
    try:
        await connection.execute(f"SET ROLE {role}")
        within = work.options(connection=connection)
        handles = [
            await within.enqueue(1),
            await work.options(connection=connection, idempotency_key="k").enqueue(2),
            *await app.enqueue_many([within.call(3), within.call(4)]),
        ]
        await app.run_worker(until_idle=True)
        assert [await handle.result(timeout=10) for handle in handles] == [1, 2, 3, 4]
    finally:
        await connection.execute(f"RESET ROLE; DROP OWNED BY {role}; DROP ROLE {role}")
        await connection.close()


async def test_the_calls_of_one_enqueue_have_one_connection(
    app: App, work: Task[[int], Any], database_url: str
) -> None:
    connection = await asyncpg.connect(database_url)
    calls = [work.call(1), work.options(connection=connection).call(2)]
    with pytest.raises(ConfigurationError, match="differs between the calls"):
        await app.enqueue_many(calls)
    with pytest.raises(ConfigurationError, match="differs between the calls"):
        await app.enqueue_many(calls, connection="another")
    assert len(await app.enqueue_many(calls, connection=connection)) == 2
    await connection.close()


async def test_a_store_in_memory_takes_part_in_no_transaction() -> None:
    async with App("memory:") as app:
        with pytest.raises(ConfigurationError, match=r"option 'connection'.*takes part in no"):
            await app.enqueue("work", connection=object())


async def test_a_type_that_only_the_database_knows_keeps_its_defaults(
    app: App, database_url: str
) -> None:
    defaults = app.tasks[0].definition.defaults
    await (await app.store()).register_types([replace(defaults, queue="q")])
    async with App(database_url) as other:
        connection = await asyncpg.connect(database_url)
        handle = await other.enqueue("work", {"n": 1}, connection=connection)
        await connection.close()
        with psycopg.connect(database_url) as c:
            by_thread = await asyncio.to_thread(other.enqueue_sync, "work", {"n": 1}, connection=c)

        assert (await handle.get()).queue == (await by_thread.get()).queue == "q"
    await asyncio.to_thread(other.close_sync)
