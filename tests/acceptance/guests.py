"""A caller's connection of each kind: the same few verbs, whatever the driver."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit, urlunsplit

import asyncpg
import django
import django.conf
import psycopg
import sqlalchemy
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import dict_row
from sqlalchemy.ext.asyncio import (
    AsyncEngine,
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
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


def _sync_sqlalchemy(kind: Callable[[Any], Any], **options: Any) -> Callable[[str], Any]:
    @asynccontextmanager
    async def opened(url: str) -> AsyncIterator[Caller]:
        engine = sqlalchemy.create_engine(sqlalchemy_url(url, "psycopg"), **options)
        with kind(engine) as c:

            def execute(statement: str) -> Any:
                return c.execute(sqlalchemy.text(statement))

            yield Caller(c, False, _now(execute), _now(c.commit), _now(c.rollback))
        engine.dispose()

    return opened


def _async_sqlalchemy(
    kind: Callable[[Any], Any], driver: str, **options: Any
) -> Callable[[str], Any]:
    @asynccontextmanager
    async def opened(url: str) -> AsyncIterator[Caller]:
        engine = create_async_engine(sqlalchemy_url(url, driver), **options)
        async with kind(engine) as c:

            async def execute(statement: str) -> Any:
                return await c.execute(sqlalchemy.text(statement))

            yield Caller(c, True, execute, c.commit, c.rollback)
        await engine.dispose()

    return opened


@asynccontextmanager
async def _scoped(engine: AsyncEngine) -> AsyncIterator[Any]:
    sessions = async_scoped_session(async_sessionmaker(engine), scopefunc=lambda: None)
    yield sessions
    await sessions.remove()


@asynccontextmanager
async def _psycopg_alone(url: str) -> AsyncIterator[Caller]:
    with psycopg.connect(url, autocommit=True) as c:
        yield Caller(c, False, _now(c.execute), _now(c.commit), _now(c.rollback))


@asynccontextmanager
async def _psycopg_async_alone(url: str) -> AsyncIterator[Caller]:
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as c:
        yield Caller(c, True, c.execute, c.commit, c.rollback)


@asynccontextmanager
async def _asyncpg_alone(url: str) -> AsyncIterator[Caller]:
    c = await asyncpg.connect(url)
    yield Caller(c, True, c.execute, _now(lambda: None), _now(lambda: None))
    await c.close()


def use_django(url: str) -> Any:
    """Let Django know the database and return its connections, each of which is a thread's own."""
    if not django.conf.settings.configured:
        django.conf.settings.configure()
        django.setup()
    from django.db import DEFAULT_DB_ALIAS, connections

    given = conninfo_to_dict(url)
    connections.settings = connections.configure_settings(
        {
            DEFAULT_DB_ALIAS: {
                "ENGINE": "django.db.backends.postgresql",
                "NAME": given["dbname"],
                "HOST": given["host"],
                "PORT": given.get("port", ""),
                "USER": given["user"],
            }
        }
    )
    return connections


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
    "sqlalchemy-async-scoped-session": _async_sqlalchemy(_scoped, "asyncpg"),
}

_AUTOCOMMIT: dict[str, Any] = {"isolation_level": "AUTOCOMMIT"}

# No transaction is open on these, and each statement commits by itself.
ALONE: dict[str, Callable[[str], AbstractAsyncContextManager[Caller]]] = {
    "psycopg": _psycopg_alone,
    "psycopg-async": _psycopg_async_alone,
    "asyncpg": _asyncpg_alone,
    "sqlalchemy-connection": _sync_sqlalchemy(lambda engine: engine.connect(), **_AUTOCOMMIT),
    "sqlalchemy-session": _sync_sqlalchemy(Session, **_AUTOCOMMIT),
    "sqlalchemy-async-connection": _async_sqlalchemy(
        lambda engine: engine.connect(), "asyncpg", **_AUTOCOMMIT
    ),
    "sqlalchemy-async-session": _async_sqlalchemy(AsyncSession, "psycopg", **_AUTOCOMMIT),
    "sqlalchemy-async-scoped-session": _async_sqlalchemy(_scoped, "asyncpg", **_AUTOCOMMIT),
}
