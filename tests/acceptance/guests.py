"""A caller's connection of each kind: the same few verbs, whatever the driver."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit, urlunsplit

import asyncpg
import psycopg
import sqlalchemy
from psycopg.rows import dict_row
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session


@dataclass(frozen=True)
class Caller:
    """A transaction of the caller, begun, on a connection that goes by this name."""

    connection: Any
    is_async: bool
    execute: Callable[[str], Awaitable[Any]]
    commit: Callable[[], Awaitable[Any]]
    rollback: Callable[[], Awaitable[Any]]


def _now(call: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    async def run(*arguments: Any) -> Any:
        return call(*arguments)

    return run


@asynccontextmanager
async def _psycopg(url: str) -> AsyncIterator[Caller]:
    with psycopg.connect(url, row_factory=dict_row) as c:
        yield Caller(c, False, _now(c.execute), _now(c.commit), _now(c.rollback))


@asynccontextmanager
async def _psycopg_async(url: str) -> AsyncIterator[Caller]:
    async with await psycopg.AsyncConnection.connect(url, row_factory=dict_row) as c:
        yield Caller(c, True, c.execute, c.commit, c.rollback)


@asynccontextmanager
async def _asyncpg(url: str) -> AsyncIterator[Caller]:
    c = await asyncpg.connect(url)
    begun = c.transaction()
    await begun.start()
    yield Caller(c, True, c.execute, begun.commit, begun.rollback)
    await c.close()


@asynccontextmanager
async def _asyncpg_pool(url: str) -> AsyncIterator[Caller]:
    async with asyncpg.create_pool(url, min_size=1, max_size=1) as pool, pool.acquire() as c:
        begun = c.transaction()
        await begun.start()
        yield Caller(c, True, c.execute, begun.commit, begun.rollback)


def _sync_sqlalchemy(kind: Callable[[Any], Any]) -> Callable[[str], Any]:
    @asynccontextmanager
    async def opened(url: str) -> AsyncIterator[Caller]:
        engine = sqlalchemy.create_engine(sqlalchemy_url(url, "psycopg"))
        with kind(engine) as c:

            def execute(statement: str) -> Any:
                return c.execute(sqlalchemy.text(statement))

            yield Caller(c, False, _now(execute), _now(c.commit), _now(c.rollback))
        engine.dispose()

    return opened


def _async_sqlalchemy(kind: Callable[[Any], Any], driver: str) -> Callable[[str], Any]:
    @asynccontextmanager
    async def opened(url: str) -> AsyncIterator[Caller]:
        engine = create_async_engine(sqlalchemy_url(url, driver))
        async with kind(engine) as c:

            async def execute(statement: str) -> Any:
                return await c.execute(sqlalchemy.text(statement))

            yield Caller(c, True, execute, c.commit, c.rollback)
        await engine.dispose()

    return opened


def sqlalchemy_url(url: str, driver: str) -> str:
    """The same database for SQLAlchemy, which wants to know the driver."""
    parts = urlsplit(url)
    asked = {name: values[0] for name, values in parse_qs(parts.query).items()}
    return urlunsplit(parts._replace(scheme=f"postgresql+{driver}", query=urlencode(asked)))


CALLERS: dict[str, Callable[[str], AbstractAsyncContextManager[Caller]]] = {
    "psycopg": _psycopg,
    "psycopg-async": _psycopg_async,
    "asyncpg": _asyncpg,
    "asyncpg-pool": _asyncpg_pool,
    "sqlalchemy-connection": _sync_sqlalchemy(lambda engine: engine.connect()),
    "sqlalchemy-session": _sync_sqlalchemy(Session),
    "sqlalchemy-async-connection": _async_sqlalchemy(lambda engine: engine.connect(), "psycopg"),
    "sqlalchemy-async-session": _async_sqlalchemy(AsyncSession, "asyncpg"),
}
