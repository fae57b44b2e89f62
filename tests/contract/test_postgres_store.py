"""The PostgreSQL store keeps every rule of a store."""

from datetime import timedelta

import asyncpg
import pytest

from contract.pgbouncer import BEHIND_POOLER, store_options
from contract.postgres_clock import PostgresClock
from contract.postgres_empty import EMPTY
from windlass.store.port import Store
from windlass.store.postgres.store import PostgresStore
from windlass.testing import StoreContract


class TestPostgresStore(StoreContract):
    capabilities = frozenset({"concurrent_writers", "wakeups", "schema"})

    @pytest.fixture(autouse=True)
    def _database(self, shared_database_url: str, shared_sql_url: str) -> None:
        self.url, self.sql_url = shared_database_url, shared_sql_url

    async def open_store(self) -> Store:
        connection = await asyncpg.connect(self.sql_url)
        await connection.execute(EMPTY)
        await connection.close()
        self.clock = await PostgresClock.install(self.sql_url)
        # Around a pooler, for wake-ups.
        direct_url = self.sql_url if BEHIND_POOLER else None
        store = PostgresStore(store_options(self.url, direct_url=direct_url))
        await store.open()
        return store

    async def close_store(self, store: Store) -> None:
        await store.close()
        await self.clock.close()

    async def advance(self, store: Store, delta: timedelta) -> None:
        await self.clock.advance(delta)


async def test_the_store_is_behind_a_pooler_if_that_is_asked_for(
    postgres_store: PostgresStore,
) -> None:
    async with postgres_store._run.transaction() as connection:
        session = await connection.fetchval("SELECT pg_backend_pid()")
        is_direct = session == connection.get_server_pid()  # a pooler makes up a number

    assert is_direct != BEHIND_POOLER
