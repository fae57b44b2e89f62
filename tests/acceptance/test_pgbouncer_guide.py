"""What the guide to PgBouncer says of drivers and of its configuration, behind a real one."""

import asyncio
import configparser
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack
from typing import Any

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
AT_ONCE = 3  # connections, for fewer sessions of the server
SETTINGS = dict(re.findall(r"(?m)^\| (\S[^|]*) \| `(\S+\(url, .*\))` \|$", PAGE.read_text()))


@pytest.fixture
def pooled_url(server_url: str, sql_url: str) -> Iterator[str]:
    (shown,) = blocks(PAGE, "ini")
    settings = configparser.RawConfigParser()
    settings.read_string(shown.text)
    also = dict(settings["pgbouncer"]) | {"default_pool_size": "2"}
    del also["listen_port"]
    with Pooler.running(server_url, also=also) as pooler:
        yield pooler.url(sql_url)


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
