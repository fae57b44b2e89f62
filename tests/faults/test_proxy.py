"""The proxy itself: it passes everything on, and what it is told to do happens at that point."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import parse_qs, urlencode, urlsplit

import asyncpg
import pytest

from faults.messages import COMMIT, When
from faults.proxy import Effect, Point, Proxy, after, before, reply

pytestmark = pytest.mark.needs_direct("tells sessions by their process, which a pooler hides")
DEADLINE = 20.0  # seconds until a test gives up
BROKEN = (OSError, asyncpg.PostgresConnectionError, asyncpg.InterfaceError)
INSERT = "INSERT INTO public.note VALUES ($1)"


@pytest.fixture
async def around(empty_database_url: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(empty_database_url)
    await connection.execute("CREATE TABLE public.note (n integer)")
    yield connection
    await connection.close()


@pytest.fixture
async def through(
    around: asyncpg.Connection, proxy: Proxy, empty_database_url: str
) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(proxy.url(empty_database_url))
    yield connection
    connection.terminate()


async def notes(around: asyncpg.Connection) -> list[int]:
    return [row["n"] for row in await around.fetch("SELECT n FROM public.note ORDER BY n")]


async def test_everything_passes_and_is_recorded(
    proxy: Proxy, through: asyncpg.Connection, around: asyncpg.Connection
) -> None:
    with proxy.recording() as recording:
        await through.execute(INSERT, 1)

    assert await notes(around) == [1]
    asked = [message.kinds for when, message in recording.seen if when is When.BEFORE]
    assert asked[-3:] == [("Bind",), ("Execute",), ("Sync", COMMIT)]
    assert after("Execute") in recording.points()
    assert reply("CommandComplete") in recording.points()


async def test_a_large_message_passes_whole(proxy: Proxy, through: asyncpg.Connection) -> None:
    large = "x" * 3_000_000

    assert await through.fetchval("SELECT $1::text", large) == large


@pytest.mark.parametrize(
    ("point", "written"),
    [
        (before("Parse"), False),
        (before("Execute"), False),
        (after("Execute"), False),  # carried out, and undone with the session
        (before("Sync"), False),
        (before(COMMIT), False),
        (after(COMMIT), True),
        (reply("CommandComplete"), True),
        (reply("ReadyForQuery"), True),
    ],
    ids=str,
)
async def test_a_cut_comes_exactly_at_its_point(
    proxy: Proxy,
    through: asyncpg.Connection,
    around: asyncpg.Connection,
    point: Point,
    written: bool,
) -> None:
    rule = proxy.at(point, text="note")

    with pytest.raises(BROKEN):
        async with asyncio.timeout(DEADLINE):
            await through.execute(INSERT, 1)

    assert [one.backend_pid for one in rule.connections] == [through.get_server_pid()]
    await gone(around, through.get_server_pid())
    assert await notes(around) == ([1] if written else [])


@pytest.mark.parametrize("point", [before(COMMIT), after(COMMIT)], ids=str)
async def test_the_commit_of_a_transaction_is_told_from_what_is_before_it(
    proxy: Proxy, through: asyncpg.Connection, around: asyncpg.Connection, point: Point
) -> None:
    proxy.at(point)

    async def write_two() -> None:
        async with asyncio.timeout(DEADLINE), through.transaction():
            await through.execute(INSERT, 1)
            await through.execute(INSERT, 2)

    with pytest.raises(BROKEN):
        await write_two()

    await gone(around, through.get_server_pid())
    assert await notes(around) == ([1, 2] if point == after(COMMIT) else [])


async def test_a_rule_is_aimed_at_the_nth_statement_of_a_text(
    proxy: Proxy, through: asyncpg.Connection, around: asyncpg.Connection
) -> None:
    proxy.at(before("Execute", 2), text="note")

    await through.execute(INSERT, 1)
    await through.execute("SELECT $1::integer", 1)
    with pytest.raises(BROKEN):
        await through.execute(INSERT, 2)

    assert await notes(around) == [1]


async def test_two_rules_befall_one_of_two_messages_each_however_close_they_come(
    proxy: Proxy, through: asyncpg.Connection, empty_database_url: str
) -> None:
    other = await asyncpg.connect(proxy.url(empty_database_url))
    await other.execute(INSERT, 0)  # prepared, so that it waits when it is carried out
    await through.execute("BEGIN")
    await through.execute("LOCK public.note IN EXCLUSIVE MODE")
    rules = [proxy.at(after(COMMIT), text="note") for _ in range(2)]

    with proxy.recording() as recording:
        waiting = asyncio.create_task(other.execute(INSERT, 1))  # its commit is sent, and not done
        async with asyncio.timeout(DEADLINE):
            while not any(COMMIT in message.kinds for _, message in recording.seen):
                await asyncio.sleep(0)
            with pytest.raises(BROKEN):
                await through.execute("COMMIT -- note")
            with pytest.raises(BROKEN):
                await waiting

    assert [len(rule.connections) for rule in rules] == [1, 1]


async def test_what_is_stalled_goes_on_when_released(
    proxy: Proxy, through: asyncpg.Connection, around: asyncpg.Connection
) -> None:
    rule = proxy.at(after(COMMIT), Effect.STALL)

    call = asyncio.create_task(through.execute(INSERT, 1))
    async with asyncio.timeout(DEADLINE):
        await rule.reached.wait()
        assert await notes(around) == [1]
        assert not call.done()
        rule.release()
        await call


async def test_a_half_open_connection_tells_neither_side(
    proxy: Proxy, through: asyncpg.Connection, around: asyncpg.Connection
) -> None:
    rule = proxy.at(before(COMMIT), Effect.HALF_OPEN)
    proxy.pass_cancellations = False

    with pytest.raises(TimeoutError):
        await through.execute(INSERT, 1, timeout=0.2)
    through.terminate()

    (connection,) = rule.connections
    assert connection.is_half_open
    assert await is_there(around, connection.backend_pid)
    proxy.cut_all()
    await gone(around, connection.backend_pid)
    assert await notes(around) == []


async def test_a_delay_only_delays(
    proxy: Proxy, through: asyncpg.Connection, around: asyncpg.Connection
) -> None:
    rule = proxy.at(before("Sync"), Effect.DELAY, delay=0.01, times=None)

    await through.execute(INSERT, 1)
    await through.execute(INSERT, 2)

    assert len(rule.connections) == 2
    assert await notes(around) == [1, 2]


async def test_everything_is_held_up_until_it_is_resumed(
    proxy: Proxy, through: asyncpg.Connection, empty_database_url: str
) -> None:
    proxy.pause()
    calls = [
        asyncio.create_task(through.execute(INSERT, 1)),
        asyncio.create_task(asyncpg.connect(proxy.url(empty_database_url))),
    ]
    done, _ = await asyncio.wait(calls, timeout=0.1)
    assert not done

    proxy.resume()

    async with asyncio.timeout(DEADLINE):
        await calls[0]
        await (await calls[1]).close()


async def test_connections_are_cut_at_any_moment_and_new_ones_refused(
    proxy: Proxy, through: asyncpg.Connection, empty_database_url: str
) -> None:
    assert proxy.cut_one(random.Random(1))
    with pytest.raises(BROKEN):
        await through.fetchval("SELECT 1")

    proxy.refusing = True
    with pytest.raises(BROKEN):
        await asyncpg.connect(proxy.url(empty_database_url))
    proxy.refusing = False
    connection = await asyncpg.connect(proxy.url(empty_database_url))
    assert proxy.cut_all() == 1
    connection.terminate()


async def test_a_server_on_tcp_is_reached_and_cut_off_as_well(
    around: asyncpg.Connection, empty_database_url: str
) -> None:
    async with Proxy(empty_database_url) as relay, tcp_before(relay) as port:
        parts = urlsplit(relay.url(empty_database_url))
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        query |= {"host": "127.0.0.1", "port": str(port)}
        url = f"postgresql://{parts.netloc}{parts.path}?{urlencode(query)}"
        async with Proxy(url) as proxy:
            connection = await asyncpg.connect(proxy.url(url))
            await connection.execute(INSERT, 1)
            proxy.at(before(COMMIT))
            with pytest.raises(BROKEN):
                await connection.execute(INSERT, 2)
            await gone(around, connection.get_server_pid())

    assert await notes(around) == [1]


async def test_nothing_is_left_behind(around: asyncpg.Connection, empty_database_url: str) -> None:
    tasks = asyncio.all_tasks()
    async with Proxy(empty_database_url) as proxy:
        url = proxy.url(empty_database_url)
        folder = Path(parse_qs(urlsplit(url).query)["host"][0])
        connections = [await asyncpg.connect(url) for _ in range(3)]
        pids = [connection.get_server_pid() for connection in connections]
        rule = proxy.at(before("Query"), Effect.STALL)
        stalled = asyncio.create_task(connections[0].execute("SELECT 1"))
        await rule.reached.wait()
        connections[1].terminate()

    with pytest.raises(BROKEN):
        await stalled
    assert asyncio.all_tasks() == tasks
    assert not await asyncio.to_thread(folder.exists)
    for pid in pids:
        await gone(around, pid)
    for connection in connections:
        connection.terminate()


@asynccontextmanager
async def tcp_before(proxy: Proxy) -> AsyncIterator[int]:
    """Let a proxy listen on a port of the loopback too, so that it is a server on TCP."""
    server = await asyncio.start_server(proxy._accept, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()


async def is_there(around: asyncpg.Connection, pid: int | None) -> bool:
    return bool(
        await around.fetchval("SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $1)", pid)
    )


async def gone(around: asyncpg.Connection, pid: int | None) -> None:
    """Return once a session has ended, and with it whatever it had not committed."""
    async with asyncio.timeout(DEADLINE):
        while await is_there(around, pid):
            await asyncio.sleep(0.005)
