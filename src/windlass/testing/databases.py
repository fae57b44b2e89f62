"""Databases for tests on a real PostgreSQL: migrated once, and copied for each test."""

import itertools
import secrets
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit, urlunsplit

import asyncpg

from windlass.store.postgres.parts import PACKAGE
from windlass.store.postgres.store import PostgresOptions, PostgresStore
from windlass.store.sqlfiles import SqlFiles

_numbers = itertools.count()


def on_database(server_url: str, name: str) -> str:
    """Return the URL of a database of this server."""
    return urlunsplit(urlsplit(server_url)._replace(path=f"/{name}"))


@asynccontextmanager
async def _administering(server_url: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(on_database(server_url, "postgres"))
    try:
        yield connection
    finally:
        await connection.close()


async def make_template(server_url: str, *, schema: str = "windlass") -> str:
    """Make a migrated database to copy, once per server and state of the migrations.

    Processes that ask for it together wait for whoever makes it.
    """
    migrations = repr(SqlFiles(PACKAGE, schema).migrations())
    name = f"windlass_template_{zlib.crc32(migrations.encode()):08x}"
    async with _administering(server_url) as admin:
        sql = SqlFiles("windlass.testing", schema)
        await admin.execute(sql.statement("lock_templates"))
        if not await admin.fetchval(sql.statement("is_template"), name):
            await admin.execute(f"DROP DATABASE IF EXISTS {name}")
            await admin.execute(f"CREATE DATABASE {name}")
            await migrate(on_database(server_url, name), schema)
            await admin.execute(f"ALTER DATABASE {name} IS_TEMPLATE true")
    return name


async def migrate(url: str, schema: str) -> None:
    """Bring a schema of a database up to date, whatever the settings of an app."""
    await PostgresStore(PostgresOptions(url=url, schema=schema)).schema.migrate()


async def make_database(server_url: str, template: str) -> str:
    """Copy a template and return the URL of the copy, which no other test has."""
    # By chance: processes in containers have the same ids, at once and one after another.
    name = f"test_{secrets.token_hex(6)}_{next(_numbers)}"
    sql = SqlFiles("windlass.testing", "windlass")
    async with _administering(server_url) as admin:
        is_careless = await admin.fetchval(sql.statement("is_careless"))
        strategy = "FILE_COPY" if is_careless else "WAL_LOG"
        await admin.execute(f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY {strategy}")
    return on_database(server_url, name)


async def drop_database(url: str) -> None:
    """Remove a database of a test, whoever is still connected to it."""
    name = urlsplit(url).path.removeprefix("/")
    async with _administering(url) as admin:
        await admin.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
