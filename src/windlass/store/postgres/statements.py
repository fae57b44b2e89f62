"""Runs statement files by name on pooled connections."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg

from windlass.model.errors import StoreUnavailable
from windlass.store.postgres.connection import GIVE_UP_AFTER, transaction, translated
from windlass.store.sqlfiles import SqlFiles


class Statements:
    """The statements of one store, once it has a pool."""

    def __init__(self, sql: SqlFiles, url: str) -> None:
        self._sql = sql
        self._url = url
        self.pool: asyncpg.Pool | None = None

    async def fetch(
        self, name: str, *arguments: Any, confirmed: bool = False
    ) -> list[asyncpg.Record]:
        """Run one statement as a transaction of its own and return its rows."""
        async with self._connection(confirmed=confirmed) as connection:
            return list(await connection.fetch(self._sql.statement(name), *arguments))

    async def fetchval(self, name: str, *arguments: Any) -> Any:
        """Run one statement as a transaction of its own and return its first value."""
        async with self._connection() as connection:
            return await connection.fetchval(self._sql.statement(name), *arguments)

    async def execute(self, name: str, *arguments: Any) -> None:
        """Run one statement as a transaction of its own."""
        async with self._connection() as connection:
            await connection.execute(self._sql.statement(name), *arguments)

    @asynccontextmanager
    async def transaction(
        self, name: str = "limit_idling", *arguments: Any, confirmed: bool = False
    ) -> AsyncIterator[asyncpg.Connection]:
        """Open a transaction for several statements; the first one limits the others."""
        async with self._connection(confirmed=confirmed) as connection, transaction(connection):
            await connection.execute(self._sql.statement(name), *arguments)
            yield connection

    @asynccontextmanager
    async def lend(self) -> AsyncIterator[asyncpg.Connection]:
        """Lend a connection for statements of somebody else, whose errors stay their own."""
        pool = self._opened()
        with translated(self._url):
            connection = await pool.acquire()
        try:
            yield connection
        finally:
            await asyncio.shield(asyncio.create_task(_give_back(pool, connection)))

    def _opened(self) -> asyncpg.Pool:
        if self.pool is None:
            raise StoreUnavailable("the store is not open")
        return self.pool

    @asynccontextmanager
    async def _connection(self, *, confirmed: bool = False) -> AsyncIterator[asyncpg.Connection]:
        """Lend a connection; one whose server does not answer to a cancellation is given up.

        `confirmed`: what is committed has to be on the synchronous standbys, if there are some.
        """
        pool = self._opened()
        with translated(self._url):
            connection = await pool.acquire()
            if confirmed:
                connection.has_unconfirmed()  # what was before is none of this call's business
            try:
                yield connection
            except BaseException as error:
                if isinstance(error, asyncpg.ReadOnlySQLTransactionError):
                    # Its server was demoted. New connections may find the primary: keep none.
                    await pool.expire_connections()
                # Whoever is cancelled meanwhile leaves it to itself, and its end is heard of.
                await asyncio.shield(asyncio.create_task(_give_back(pool, connection)))
                raise
            is_lacking = confirmed and connection.has_unconfirmed()
            await _give_back_idle(pool, connection)
            if is_lacking:
                raise StoreUnavailable(
                    "committed by the primary, but somebody ended the wait for its standby: "
                    "it is lost if that takes over now"
                )


async def _give_back_idle(pool: asyncpg.Pool, connection: asyncpg.Connection) -> None:
    """Give back a connection on which nothing is under way.

    The driver does it in a task of its own, for whoever is cancelled meanwhile, and that takes two
    turns of the event loop: as long as all the rest that an enqueue does here. With nothing to wait
    for there is no meanwhile, and if it has to close the connection, a cancellation cuts it off.
    """
    holder, inner = getattr(connection, "_holder", None), getattr(connection, "_con", None)
    if holder is None or inner is None or not hasattr(inner, "_on_release"):
        await _give_back(pool, connection)  # the session has ended, or the driver is another
        return
    inner._on_release()  # noqa: SLF001 - as the driver's pool does
    await holder.release(None)  # closing has a limit of its own


async def _give_back(pool: asyncpg.Pool, connection: asyncpg.Connection) -> None:
    try:
        await pool.release(connection, timeout=GIVE_UP_AFTER)
    except TimeoutError:
        # It is closed. If it was the network that fell silent, then on all of them: nobody is to
        # wait for each in turn.
        await pool.expire_connections()
