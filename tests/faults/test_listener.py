"""A listener notices by itself that it hears nothing, and repairs itself; polling delivers meanwhile."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit, urlunsplit
from uuid import UUID, uuid4

import asyncpg
import pytest

from contract.pgbouncer import BEHIND_POOLER, SESSIONS, Pooler, store_options
from contract.postgres_sessions import LEASE, WORKER, add, new_task, worker_info
from faults.conftest import FOR_EVER
from faults.proxy import Proxy
from faults.said import DEADLINE, Said
from faults.servers import Server
from windlass import App
from windlass.model.task import NewTask
from windlass.store.postgres import connection as connection_module
from windlass.store.postgres import listener
from windlass.store.postgres.dial import Route
from windlass.store.postgres.store import PostgresStore

NOWHERE = "postgresql://nobody@127.0.0.1:1/none"  # where nothing listens
EVENTS = "listener."
LISTENING = """
SELECT pid FROM pg_stat_activity
WHERE datname = current_database() AND application_name = 'windlass'
    AND query LIKE '%pg_listening_channels%'
"""


NOTIFY = "SELECT pg_notify('windlass.wake', $1)"


class Ear:
    """An idle worker that listens, and how often it was woken."""

    def __init__(self, store: PostgresStore) -> None:
        self.store = store
        self.woken = asyncio.Event()
        self.lanes: list[int | None] = []  # that it was woken for
        self.tasks: list[UUID | None] = []

    def wake(self, lane: int | None = None, task_id: UUID | None = None) -> None:
        self.lanes.append(lane)
        self.tasks.append(task_id)
        self.woken.set()

    async def hears(self, act: Callable[[], Awaitable[object]]) -> None:
        """Act, and wait until it is woken."""
        self.woken.clear()
        await act()
        await asyncio.wait_for(self.woken.wait(), DEADLINE)

    async def hears_of_a_task(self) -> None:
        await self.hears(lambda: add(self.store))


@asynccontextmanager
async def listening(url: str, direct_url: str | None, **options: Any) -> AsyncIterator[Ear]:
    store = PostgresStore(store_options(url, direct_url=direct_url, **options))
    await store.open()
    await store.register(worker_info(), lease=LEASE)
    await store.set_idle(WORKER, idle=True)
    ear = Ear(store)
    try:
        async with store.listen(ear.wake):
            yield ear
    finally:
        await store.close()


async def listening_session(watcher: asyncpg.Connection) -> int:
    async with asyncio.timeout(DEADLINE):
        while (pid := await watcher.fetchval(LISTENING)) is None:
            await asyncio.sleep(0.01)
    return int(pid)


async def test_a_wake_up_names_the_lane_and_what_others_say_does_not_harm(
    database_url: str, direct_url: str | None, watcher: asyncpg.Connection
) -> None:
    lane = "SELECT windlass.lane_number('default', 'resize', $1::smallint, 0::smallint)"
    usual, high = [await watcher.fetchval(lane, priority) for priority in (10, 50)]
    keyed = [new_task(idempotency_key="a"), new_task(idempotency_key="b", priority=50)]
    enqueued: list[tuple[list[NewTask], int | None]] = [
        ([new_task()], usual),
        ([new_task(priority=50), new_task(priority=50)], high),
        ([new_task(), new_task(priority=50)], None),
        (keyed[:1], usual),
        (keyed[1:], high),
        ([new_task(idempotency_key="c"), new_task(idempotency_key="d")], None),
        ([new_task(delay=1000.0)], None),
        ([new_task(at=datetime.now(UTC) + timedelta(days=1))], None),
    ]
    async with listening(database_url, direct_url) as ear:
        for tasks, named in enqueued:
            await ear.hears(partial(ear.store.enqueue, tasks))
            assert ear.lanes[-1] == named
        await ear.hears(partial(watcher.execute, NOTIFY, "-5"))
        assert ear.lanes[-1] == -5

        for said in ("", "resize", "1.0", "9223372036854775808", "-9223372036854775809", "१"):
            await ear.hears(partial(watcher.execute, NOTIFY, said))
            assert ear.lanes[-1] is None, said


async def test_a_wake_up_names_a_plain_task_that_came_alone(
    database_url: str, direct_url: str | None, watcher: asyncpg.Connection
) -> None:
    lane = await watcher.fetchval(
        "SELECT windlass.lane_number('default', 'resize', 10::int2, 0::int2)"
    )
    plain = new_task()
    others = [[new_task(), new_task()], [new_task(idempotency_key="a")], [new_task(tags=("t",))]]
    async with listening(database_url, direct_url) as ear:
        await ear.hears(partial(ear.store.enqueue, [plain]))
        await ear.hears(partial(watcher.execute, "SELECT windlass.enqueue('resize')"))
        by_sql = await watcher.fetchval("SELECT id FROM windlass.tasks WHERE id <> $1", plain.id)
        assert ear.tasks == [plain.id, by_sql]
        assert ear.lanes == [lane, lane]

        for tasks in others:
            await ear.hears(partial(ear.store.enqueue, tasks))
            assert ear.tasks[-1] is None

        await ear.hears(partial(watcher.execute, NOTIFY, f"-5 {plain.id}"))
        assert (ear.lanes[-1], ear.tasks[-1]) == (-5, plain.id)
        for said in (f"{plain.id}", f"5 {plain.id} ", f"5  {plain.id}", f"x {plain.id}", "5 5"):
            await ear.hears(partial(watcher.execute, NOTIFY, said))
            assert (ear.lanes[-1], ear.tasks[-1]) == (None, None), said


# What befalls its connection


def test_a_dead_connection_is_known_within_five_seconds() -> None:
    assert listener.PROBE_EVERY + listener.PROBED_WITHIN <= 5


async def test_a_session_that_is_ended_is_noticed_without_a_probe(
    database_url: str,
    direct_url: str | None,
    watcher: asyncpg.Connection,
    said: Said,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listener, "PROBE_EVERY", FOR_EVER)
    async with listening(database_url, direct_url) as ear:
        session = await listening_session(watcher)

        await ear.hears(lambda: watcher.execute("SELECT pg_terminate_backend($1)", session))

        await ear.hears_of_a_task()
        assert said.events(EVENTS) == ["listener.lost", "listener.repaired"]


@pytest.mark.usefixtures("impatient")
async def test_a_connection_on_which_nothing_passes_is_noticed(
    database_url: str, sql_url: str, direct_proxy: Proxy, said: Said
) -> None:
    async with listening(database_url, direct_proxy.url(sql_url)) as ear:
        assert direct_proxy.half_open_all() == 1

        await said.until("listener.repaired")

        await ear.hears_of_a_task()
        assert said.events(EVENTS) == ["listener.lost", "listener.repaired"]


@pytest.mark.usefixtures("impatient")
async def test_a_session_that_no_longer_listens_is_noticed(
    database_url: str, direct_url: str | None, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def connect_and_unlisten(route: Route) -> asyncpg.Connection:
        monkeypatch.setattr(listener, "connect", connection_module.connect)
        session = await connection_module.connect(route)
        probe = session.fetchrow

        async def unlisten_before(*arguments: Any, **options: Any) -> Any:
            await session.execute("UNLISTEN *")
            return await probe(*arguments, **options)

        session.fetchrow = unlisten_before
        return session

    monkeypatch.setattr(listener, "connect", connect_and_unlisten)
    async with listening(database_url, direct_url) as ear:
        await said.until("listener.repaired")

        await ear.hears_of_a_task()
        assert said.events(EVENTS) == ["listener.lost", "listener.repaired"]


@pytest.mark.usefixtures("impatient")
async def test_an_outage_is_told_once_however_often_it_tries(
    database_url: str,
    sql_url: str,
    direct_proxy: Proxy,
    said: Said,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries = 0
    enough = asyncio.Event()

    async def counted(route: Route) -> asyncpg.Connection:
        nonlocal tries
        tries += 1
        if tries > 5:
            enough.set()
        return await connection_module.connect(route)

    monkeypatch.setattr(listener, "connect", counted)
    async with listening(database_url, direct_proxy.url(sql_url)) as ear:
        direct_proxy.refusing = True
        direct_proxy.cut_all()
        await asyncio.wait_for(enough.wait(), DEADLINE)
        assert said.events(EVENTS) == ["listener.lost"]

        direct_proxy.refusing = False
        await said.until("listener.repaired")

        await ear.hears_of_a_task()
        assert said.events(EVENTS) == ["listener.lost", "listener.repaired"]


@pytest.mark.usefixtures("impatient")
async def test_a_listener_survives_an_error_that_nobody_knows(
    database_url: str, direct_url: str | None, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail_once(route: Route) -> asyncpg.Connection:
        monkeypatch.setattr(listener, "connect", connection_module.connect)
        raise RuntimeError("never seen before")

    monkeypatch.setattr(listener, "connect", fail_once)
    async with listening(database_url, direct_url) as ear:
        await said.until("listener.repaired")

        await ear.hears_of_a_task()
        assert "listener.lost error=RuntimeError: never seen before" in said.lines


@pytest.mark.usefixtures("impatient")
async def test_a_role_that_may_not_log_in_for_a_while_is_told_and_waited_for(
    database_url: str, sql_url: str, watcher: asyncpg.Connection, said: Said
) -> None:
    role = f"ears_{uuid4().hex}"
    await watcher.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'secret'")
    parts = urlsplit(sql_url)
    host = parts.netloc.rpartition("@")[2]
    as_role = urlunsplit(parts._replace(netloc=f"{role}:secret@{host}"))
    try:
        async with listening(database_url, as_role) as ear:
            await watcher.execute(f"ALTER ROLE {role} NOLOGIN")
            await watcher.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = $1", role
            )
            await said.until("listener.deaf")
            assert "not permitted to log in" in said.lines[-1]
            assert "secret" not in said.lines[-1]

            await watcher.execute(f"ALTER ROLE {role} LOGIN")
            await said.until("listener.repaired")

            await ear.hears_of_a_task()
            assert said.events(EVENTS) == ["listener.lost", "listener.deaf", "listener.repaired"]
    finally:
        await watcher.execute(f"DROP ROLE {role}")


@pytest.mark.usefixtures("impatient")
async def test_of_several_hosts_the_next_one_is_listened_to(
    database_url: str, sql_url: str, direct_proxy: Proxy, said: Said
) -> None:
    async with AsyncExitStack() as first_host:
        first = await first_host.enter_async_context(Proxy(sql_url))
        urls = [urlsplit(one.url(sql_url)) for one in (first, direct_proxy)]
        hosts, ports = (
            ",".join(parse_qs(url.query)[part][0] for url in urls) for part in ("host", "port")
        )
        both = urlunsplit(urls[0]._replace(query=urlencode({"host": hosts, "port": ports})))
        async with listening(database_url, both) as ear:
            assert (first.accepted, direct_proxy.accepted) == (1, 0)

            await first_host.aclose()

            await said.until("listener.repaired")
            await ear.hears_of_a_task()
            assert direct_proxy.accepted == 1


async def test_a_listener_outlives_a_restart_of_the_server(
    server: Server, way: str, said: Said
) -> None:
    async with listening(way, server.url if BEHIND_POOLER else None) as ear:
        await asyncio.to_thread(server.restart)
        await said.until("listener.repaired")

        await ear.hears_of_a_task()
        assert said.events(EVENTS) == ["listener.lost", "listener.repaired"]


# What a worker does without it


async def run_one(app: App) -> None:
    """Let a worker that is there already run a task."""
    handle = await app.enqueue("double", {"number": 21})
    assert await handle.result(DEADLINE) == 42


def app_with(url: str, direct_url: str) -> App:
    app = App(url, direct_url=direct_url, poll=0.2)

    @app.task
    async def double(number: int) -> int:
        return 2 * number

    return app


@pytest.mark.usefixtures("impatient")
async def test_while_the_listener_is_lost_polling_delivers(
    database_url: str, sql_url: str, direct_proxy: Proxy, said: Said
) -> None:
    async with app_with(database_url, direct_proxy.url(sql_url)) as app, app.worker():
        await run_one(app)
        direct_proxy.pause()
        await said.until("listener.lost")

        await run_one(app)

        assert said.events(EVENTS) == ["listener.lost"]
        direct_proxy.resume()
        await said.until("listener.repaired")
        await run_one(app)


@pytest.mark.parametrize(
    ("direct_url", "event"),
    [(NOWHERE, "listener.lost"), ("no such role", "listener.deaf")],
    ids=["nowhere", "refused"],
)
async def test_a_worker_whose_direct_url_is_wrong_says_so_and_polls(
    database_url: str, sql_url: str, said: Said, direct_url: str, event: str
) -> None:
    if direct_url == "no such role":
        parts = urlsplit(sql_url)
        host = parts.netloc.rpartition("@")[2]
        direct_url = urlunsplit(parts._replace(netloc=f"nobody_{uuid4().hex}:secret@{host}"))
    async with app_with(database_url, direct_url) as app, app.worker():
        await run_one(app)

        await said.until(event)
        assert said.events(EVENTS) == [event]


async def test_a_worker_does_not_wait_for_a_listener_that_gets_no_answer(
    database_url: str,
    sql_url: str,
    direct_proxy: Proxy,
    said: Said,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listener, "CONNECT_WITHIN", FOR_EVER)
    monkeypatch.setattr(listener, "START_WITHIN", 0.1)
    direct_proxy.pause()
    async with app_with(database_url, direct_proxy.url(sql_url)) as app, app.worker():
        await run_one(app)

    assert said.events(EVENTS) == []


async def test_who_began_before_it_listened_is_woken_once_it_does(
    database_url: str, sql_url: str, direct_proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "START_WITHIN", 0.1)
    direct_proxy.pause()
    async with listening(database_url, direct_proxy.url(sql_url)) as ear:

        async def resume() -> None:
            direct_proxy.resume()

        await ear.hears(resume)


# A pooler in between


IGNORED = (
    "default_transaction_isolation",
    "idle_in_transaction_session_timeout",
    "jit",
    "tcp_keepalives_idle",
    "tcp_keepalives_interval",
    "tcp_keepalives_count",
)


@pytest.fixture
def transaction_pooler(server_url: str) -> Iterator[Pooler]:
    with Pooler.running(server_url, ignored=IGNORED) as pooler:
        yield pooler


@pytest.fixture
def session_pooler(server_url: str) -> Iterator[Pooler]:
    with Pooler.running(server_url, mode="session", ignored=IGNORED) as pooler:
        yield pooler


async def channels(pooled_url: str, sessions: int) -> set[str]:
    """The channels that any session of the pooler listens to."""
    connections = [
        await asyncpg.connect(pooled_url, statement_cache_size=0) for _ in range(sessions)
    ]
    found: set[str] = set()
    try:
        for connection in connections:
            await connection.execute("BEGIN")  # so that each has a session of its own
            rows = await connection.fetch("SELECT pg_listening_channels()")
            found.update(row[0] for row in rows)
    finally:
        for connection in connections:
            await connection.close()
    return found


async def test_a_way_around_that_is_a_pooler_in_transaction_mode_is_told(
    transaction_pooler: Pooler,
    database_url: str,
    sql_url: str,
    said: Said,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listener, "ECHO_WITHIN", 0.5)
    pooled_url = transaction_pooler.url(sql_url)
    async with app_with(database_url, pooled_url) as app, app.worker():
        await run_one(app)

        await said.until("listener.deaf")
        assert "pooler in transaction mode" in said.lines[-1]
        assert said.events(EVENTS) == ["listener.deaf"]
    assert "windlass.wake" not in await channels(pooled_url, SESSIONS)


async def test_a_way_around_that_is_a_pooler_in_session_mode_is_as_good(
    session_pooler: Pooler, database_url: str, sql_url: str, said: Said
) -> None:
    async with listening(database_url, session_pooler.url(sql_url)) as ear:
        await ear.hears_of_a_task()

    assert said.events(EVENTS) == []


async def test_a_way_around_to_another_database_is_told(
    database_url: str, empty_sql_url: str, said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "ECHO_WITHIN", 0.5)
    async with listening(database_url, empty_sql_url):
        await said.until("listener.deaf")
