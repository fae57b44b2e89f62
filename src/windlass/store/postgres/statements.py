"""Runs statement files by name on pooled connections."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg

from windlass.model.errors import StoreUnavailable
from windlass.store.postgres.connection import translated
from windlass.store.sqlfiles import SqlFiles


class Statements:
    """The statements of one store, once it has a pool."""

    def __init__(self, sql: SqlFiles) -> None:
        self._sql = sql
        self.pool: asyncpg.Pool | None = None

    async def fetch(self, name: str, *arguments: Any) -> list[asyncpg.Record]:
        """Run one statement as a transaction of its own and return its rows."""
        with translated():
            return list(await self._pool.fetch(self._sql.statement(name), *arguments))

    async def fetchval(self, name: str, *arguments: Any) -> Any:
        """Run one statement as a transaction of its own and return its first value."""
        with translated():
            return await self._pool.fetchval(self._sql.statement(name), *arguments)

    async def execute(self, name: str, *arguments: Any) -> None:
        """Run one statement as a transaction of its own."""
        with translated():
            await self._pool.execute(self._sql.statement(name), *arguments)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[asyncpg.Connection]:
        """Open a transaction for several statements."""
        with translated():
            async with self._pool.acquire() as connection, connection.transaction():
                yield connection

    @property
    def _pool(self) -> asyncpg.Pool:
        if self.pool is None:
            raise StoreUnavailable("the store is not open")
        return self.pool
