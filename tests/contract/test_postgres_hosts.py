"""Of several hosts one connection is kept, whoever else answers."""

import asyncio
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit, urlunsplit

import asyncpg
import pytest

from windlass.store.postgres import dial as dial_module
from windlass.store.postgres.dial import dial

DEADLINE = 20.0  # seconds until a test gives up


def as_two_hosts(url: str) -> str:
    """The same server, named twice."""
    parts = urlsplit(url)
    query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    host = query.get("host") or parts.hostname or "127.0.0.1"
    port = query.get("port") or str(parts.port or 5432)
    owner, at, _ = parts.netloc.rpartition("@")
    query |= {"host": f"{host},{host}", "port": f"{port},{port}"}
    return urlunsplit(parts._replace(netloc=f"{owner}{at}", query=urlencode(query)))


async def test_of_two_connections_that_come_at_once_the_other_is_closed(
    sql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dial_module, "NEXT_HOST_AFTER", 0.05)
    connect, both = asyncpg.connect, asyncio.Event()
    made: list[asyncpg.Connection] = []

    async def connect_at_once(*arguments: Any, **options: Any) -> asyncpg.Connection:
        connection = await connect(*arguments, **options)
        made.append(connection)
        if len(made) == 2:
            both.set()
        await both.wait()
        return connection

    monkeypatch.setattr(asyncpg, "connect", connect_at_once)
    async with asyncio.timeout(DEADLINE):
        kept = await dial(None, as_two_hosts(sql_url))

    (other,) = (connection for connection in made if connection is not kept)
    assert other.is_closed()
    assert await kept.fetchval("SELECT 1") == 1
    await kept.close()


async def test_a_host_that_is_silent_is_not_waited_for_once_another_has_answered(
    sql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dial_module, "NEXT_HOST_AFTER", 0.05)
    connect = asyncpg.connect
    dialled: list[asyncio.Task[Any] | None] = []

    async def connect_but_the_first(*arguments: Any, **options: Any) -> asyncpg.Connection:
        dialled.append(asyncio.current_task())
        if len(dialled) == 1:
            await asyncio.Event().wait()
        return await connect(*arguments, **options)

    monkeypatch.setattr(asyncpg, "connect", connect_but_the_first)
    async with asyncio.timeout(DEADLINE):
        kept = await dial(None, as_two_hosts(sql_url))

    silent = dialled[0]
    assert silent is not None
    assert silent.cancelled()
    await kept.close()
