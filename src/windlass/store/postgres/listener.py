"""LISTEN on a connection of its own: tells fetchers to look before they would poll."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import asyncpg

from windlass.model.errors import StoreUnavailable
from windlass.store.postgres.connection import connect, translated
from windlass.store.postgres.dial import Revive
from windlass.store.sqlfiles import SqlFiles
from windlass.telemetry import emit

PROBE_EVERY = 5.0  # seconds without a sign of life before the connection is tried
REPAIR_AFTER = 1.0  # seconds between two attempts to connect again


class Listener:
    """Keeps one connection listening, and repairs it; polling covers what is missed meanwhile."""

    def __init__(self, url: str, sql: SqlFiles, *, pooler: bool, revive: Revive | None) -> None:
        self._url = url
        self._sql = sql
        self._pooler = pooler
        self._revive = revive
        self._connection: asyncpg.Connection | None = None

    @asynccontextmanager
    async def listening(self, wake: Callable[[], None]) -> AsyncIterator[None]:
        """Call `wake` on every notification until the context is left."""
        await self._connect(wake)
        task = asyncio.create_task(self._keep(wake), name="windlass-listener")
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            if self._connection is not None:
                self._connection.terminate()

    async def _connect(self, wake: Callable[[], None]) -> None:
        self._connection = connection = await connect(
            self._url, pooler=self._pooler, revive=self._revive
        )

        def notified(*_: Any) -> None:
            wake()

        with translated(self._url):
            await connection.add_listener(self._sql.in_schema("windlass.wake"), notified)

    async def _keep(self, wake: Callable[[], None]) -> None:
        while True:
            if self._connection is not None:
                await self._watch(self._connection)
            await self._reconnect(wake)
            wake()  # something may have been missed

    async def _watch(self, connection: asyncpg.Connection) -> None:
        """Return once the connection is dead."""
        while not connection.is_closed():
            await asyncio.sleep(PROBE_EVERY)
            try:
                with translated(self._url):
                    await connection.execute(self._sql.statement("probe"), timeout=PROBE_EVERY)
            except (StoreUnavailable, TimeoutError) as error:
                connection.terminate()
                emit("listener.lost", error=error)
                return

    async def _reconnect(self, wake: Callable[[], None]) -> None:
        while True:
            try:
                await self._connect(wake)
            except StoreUnavailable:
                await asyncio.sleep(REPAIR_AFTER)
            else:
                emit("listener.repaired")
                return
