"""What the guide to PgBouncer says of drivers and of its configuration, behind a real one."""

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import asyncpg
import psycopg
import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine

from acceptance.guests import sqlalchemy_url
from acceptance.test_docs import ROOT, blocks
from contract.pgbouncer import Pooler
from windlass import App

PAGE = ROOT / "docs" / "pgbouncer.md"
TIMES = 12  # more than a driver waits before it prepares a statement
PASSWORD = "secret"
AT_ONCE = 3  # connections, for fewer sessions of the server
SETTINGS = dict(re.findall(r"(?m)^\| (\S[^|]*) \| `(\S+\(url, .*\))` \|$", PAGE.read_text()))


class PrintedPooler(Pooler):
    """One with the configuration of the guide and nothing else, but for names, places and its size."""

    def __init__(self, folder: Path, server_url: str, *, database: str, role: str) -> None:
        super().__init__(folder, server_url)
        self._database, self._role, self._port = database, role, free_port()

    def url(self, database_url: str) -> str:
        return f"postgresql://{self._role}:{PASSWORD}@127.0.0.1:{self._port}/shop"

    def _settings(self) -> str:
        (shown,), (users,) = blocks(PAGE, "ini"), blocks(PAGE, "text")
        userlist = self.folder / "userlist.txt"
        userlist.write_text(
            replaced(users.text, {'"shop"': f'"{self._role}"', "the password of shop": PASSWORD})
        )
        return replaced(
            shown.text,
            {
                "host=database": f"host={self._server['host']}",
                "port=5432": f"port={self._server['port']}",
                "dbname=shop": f"dbname={self._database}",
                "6432": str(self._port),
                "/etc/pgbouncer/userlist.txt": str(userlist),
                "default_pool_size = 20": "default_pool_size = 2",  # so that sessions are shared
            },
        )


def replaced(text: str, words: Mapping[str, str]) -> str:
    for old, new in words.items():
        assert text.count(old) == 1, f"{old} is not there once"
        text = text.replace(old, new)
    return text


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port: int = unused.getsockname()[1]
        return port


@pytest.fixture
async def role(sql_url: str) -> AsyncIterator[str]:
    """A role with a password that may do what the owner of the schema may."""
    name = f"shop_{uuid4().hex}"
    session = await asyncpg.connect(sql_url)
    await session.execute(f"CREATE ROLE {name} LOGIN PASSWORD '{PASSWORD}'")
    await session.execute(f"DO $$ BEGIN EXECUTE format('GRANT %I TO {name}', current_user); END $$")
    yield name
    await session.execute(f"DROP ROLE {name}")
    await session.close()


@pytest.fixture
def pooled_url(server_url: str, sql_url: str, role: str) -> Iterator[str]:
    database = urlsplit(sql_url).path.removeprefix("/")
    with PrintedPooler.running(server_url, database=database, role=role) as pooler:
        yield pooler.url(sql_url)


async def test_the_printed_configuration_lets_in_over_tcp_whoever_has_the_password(
    pooled_url: str, role: str
) -> None:
    connection = await asyncpg.connect(pooled_url, statement_cache_size=0)
    who = await connection.fetchval("SELECT session_user::text")
    await connection.close()

    assert who == role
    with pytest.raises(asyncpg.PostgresError, match="SASL authentication failed"):
        await asyncpg.connect(pooled_url.replace(PASSWORD, "a guess"))


@pytest.fixture
async def app(pooled_url: str, sql_url: str) -> AsyncIterator[App]:
    async with App(pooled_url, pooler=True, direct_url=sql_url) as app:
        yield app


async def test_connections_set_as_the_guide_says_share_sessions(app: App, pooled_url: str) -> None:
    @app.task
    async def note(n: int) -> None: ...

    async with AsyncExitStack() as stack:
        connections = []
        for _ in range(AT_ONCE):
            connections.append(await _opened("asyncpg", pooled_url))
            stack.push_async_callback(connections[-1].close)
        engine = _opened("SQLAlchemy on asyncpg", sqlalchemy_url(pooled_url, "asyncpg"))
        stack.push_async_callback(engine.dispose)
        for _ in range(AT_ONCE):
            connections.append(await stack.enter_async_context(engine.connect()))

        for n in range(TIMES):
            for connection in connections:
                begin = getattr(connection, "transaction", None) or connection.begin
                async with begin():
                    await note.options(connection=connection).enqueue(n)

    assert await _tasks(app) == TIMES * AT_ONCE * 2


async def test_synchronous_connections_set_as_the_guide_says_share_sessions(
    app: App, pooled_url: str
) -> None:
    @app.task
    async def note(n: int) -> None: ...

    def enqueue() -> None:
        with ExitStack() as stack:
            connections = [
                stack.enter_context(_opened("psycopg 3", pooled_url)) for _ in range(AT_ONCE)
            ]
            engine = _opened("SQLAlchemy on psycopg 3", sqlalchemy_url(pooled_url, "psycopg"))
            stack.callback(engine.dispose)
            connections += [stack.enter_context(engine.connect()) for _ in range(AT_ONCE)]
            for n in range(TIMES):
                for connection in connections:
                    note.options(connection=connection).enqueue_sync(n)
                    connection.commit()

    await asyncio.to_thread(enqueue)

    assert await _tasks(app) == TIMES * AT_ONCE * 2


def _opened(driver: str, url: str) -> Any:
    """What the guide tells to open, on this database."""
    names = {
        "asyncpg": asyncpg,
        "psycopg": psycopg,
        "create_engine": create_engine,
        "create_async_engine": create_async_engine,
        "url": url,
    }
    return eval(SETTINGS[driver], names)


async def _tasks(app: App) -> int:
    (queue,) = await (await app.store()).queues()
    return sum(queue.counts.values())
