"""The PostgreSQL store keeps every rule of a store."""

from datetime import timedelta

import asyncpg
import pytest

from contract.postgres_clock import PostgresClock
from contract.postgres_empty import EMPTY
from windlass.store.port import Store
from windlass.store.postgres.store import PostgresOptions, PostgresStore
from windlass.testing import StoreContract


class TestPostgresStore(StoreContract):
    capabilities = frozenset({"concurrent_writers", "wakeups", "schema"})

    @pytest.fixture(autouse=True)
    def _database(self, shared_database_url: str) -> None:
        self.url = shared_database_url

    async def open_store(self) -> Store:
        connection = await asyncpg.connect(self.url)
        await connection.execute(EMPTY)
        await connection.close()
        self.clock = await PostgresClock.install(self.url)
        store = PostgresStore(PostgresOptions(url=self.url))
        await store.open()
        return store

    async def close_store(self, store: Store) -> None:
        await store.close()
        await self.clock.close()

    async def advance(self, store: Store, delta: timedelta) -> None:
        await self.clock.advance(delta)
