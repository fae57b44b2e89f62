"""Runs statement files by name on pooled connections."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg

from windlass.model.errors import StoreUnavailable
from windlass.store.postgres.connection import (
    BROKEN,
    GIVE_UP_AFTER,
    promised_for,
    transaction,
    translated,
)
from windlass.store.sqlfiles import SqlFiles


class Statements:
    """The statements of one store, once it has a pool."""

    def __init__(self, sql: SqlFiles, url: str) -> None:
        self._sql = sql
        self._url = url
        self.pool: asyncpg.Pool | None = None
        self._spare: tuple[asyncpg.Pool, asyncpg.Connection] | None = None
        self._waiting = 0  # calls that want a connection of the pool
        self._generation = 0  # of connections; those of an older one are not to be used again

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
        with translated(self._url):
            pool, connection, _ = await self.take()
        try:
            yield connection
        finally:
            await asyncio.shield(asyncio.create_task(self._give_back(pool, connection)))

    async def expire(self) -> None:
        """Use none of the connections there are any more."""
        self._generation += 1
        if self.pool is not None:
            await self.pool.expire_connections()
        await self._let_go_of_spare()

    async def close(self, within: float) -> None:
        """Close all connections; those that are in use after so many seconds are cut off."""
        pool, self.pool = self.pool, None
        await self._let_go_of_spare()
        if pool is not None:
            try:
                await asyncio.wait_for(pool.close(), within)
            except BROKEN:
                pool.terminate()

    async def take(self) -> tuple[asyncpg.Pool, asyncpg.Connection, int]:
        """Return a connection that nobody uses, the pool that it is of, and its generation.

        It is the last one that was given back, or one of the pool.
        """
        pool = self._opened()
        if self._spare is not None:
            of, connection = self._spare
            if of is pool and _is_open(connection):
                self._spare = None
                return pool, connection, self._generation
            await self._let_go_of_spare()
        self._waiting += 1
        try:
            connection = await pool.acquire()
        finally:
            self._waiting -= 1
        return pool, connection, self._generation

    def _keep(self, pool: asyncpg.Pool, connection: asyncpg.Connection, taken_in: int) -> bool:
        """Keep a connection at hand for the next call, unless somebody waits for it or there is no other.

        To take it out of the pool and to put it back is a sixth of what a single enqueue costs the client.
        """
        if self._spare is not None or self._waiting:
            return False
        if pool is not self.pool or taken_in != self._generation:
            return False
        if not isinstance(pool, asyncpg.Pool) or pool.get_max_size() == 1:
            return False
        self._spare = pool, connection
        return True

    async def _let_go_of_spare(self) -> None:
        spare, self._spare = self._spare, None
        if spare is not None:
            # Whoever is cancelled meanwhile leaves it to itself.
            await asyncio.shield(asyncio.create_task(self._give_back(*spare)))

    def _opened(self) -> asyncpg.Pool:
        if self.pool is None:
            raise StoreUnavailable("the store is not open")
        return self.pool

    def _connection(self, *, confirmed: bool = False) -> "_Lent":
        """Lend a connection for one of our calls, whose errors are then ours too.

        `confirmed`: what is committed has to be on the synchronous standbys, if there are some.
        """
        return _Lent(self, self._url, confirmed)

    async def give_back(
        self, pool: asyncpg.Pool, connection: asyncpg.Connection, taken_in: int
    ) -> None:
        """Take back a connection on which nothing is under way."""
        if not self._keep(pool, connection, taken_in):
            await self._give_back_idle(pool, connection)

    async def give_up(
        self, pool: asyncpg.Pool, connection: asyncpg.Connection, error: BaseException
    ) -> None:
        """Take back a connection after an error; one whose server stays silent is closed."""
        if isinstance(error, asyncpg.ReadOnlySQLTransactionError):
            # Its server was demoted. New connections may find the primary: keep none.
            await self.expire()
        # Whoever is cancelled meanwhile leaves it to itself, and its end is heard of.
        await asyncio.shield(asyncio.create_task(self._give_back(pool, connection)))

    async def _give_back_idle(self, pool: asyncpg.Pool, connection: asyncpg.Connection) -> None:
        """Give back a connection on which nothing is under way.

        The driver does it in a task of its own, for whoever is cancelled meanwhile, and that takes two
        turns of the event loop: as long as all the rest that an enqueue does here. With nothing to wait
        for there is no meanwhile, and if it has to close the connection, a cancellation cuts it off.
        """
        holder, inner = getattr(connection, "_holder", None), getattr(connection, "_con", None)
        if holder is None or inner is None or not hasattr(inner, "_on_release"):
            # The session has ended, or the driver is another.
            await self._give_back(pool, connection)
            return
        inner._on_release()  # noqa: SLF001 - as the driver's pool does
        await holder.release(None)  # closing has a limit of its own

    async def _give_back(self, pool: asyncpg.Pool, connection: asyncpg.Connection) -> None:
        try:
            await pool.release(connection, timeout=GIVE_UP_AFTER)
        except TimeoutError:
            # It is closed. If it was the network that fell silent, then on all of them: nobody is to
            # wait for each in turn.
            await self.expire()


class _Lent:
    """A connection while one of our calls lasts. No generator: every call would pay for one."""

    __slots__ = ("_confirmed", "_connection", "_of", "_pool", "_taken_in", "_url")

    def __init__(self, of: Statements, url: str, confirmed: bool) -> None:
        self._of = of
        self._url = url
        self._confirmed = confirmed

    async def __aenter__(self) -> asyncpg.Connection:
        with translated(self._url):
            self._pool, connection, self._taken_in = await self._of.take()
        self._connection = connection
        if self._confirmed:
            connection.has_unconfirmed()  # what was before is none of this call's business
        return connection

    async def __aexit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is not None:
            with translated(self._url):
                await self._of.give_up(self._pool, self._connection, error)
            promised = promised_for(error, self._url)
            if promised is not None:
                raise promised from error
            return
        is_lacking = self._confirmed and self._connection.has_unconfirmed()
        with translated(self._url):
            await self._of.give_back(self._pool, self._connection, self._taken_in)
        if is_lacking:
            raise StoreUnavailable(
                "committed by the primary, but somebody ended the wait for its standby: "
                "it is lost if that takes over now"
            )


def _is_open(connection: asyncpg.Connection) -> bool:
    try:
        return not connection.is_closed()
    except asyncpg.InterfaceError:
        return False  # its session has ended, and the pool has taken it back by itself
