"""The store inside this process keeps every rule of a store."""

from datetime import UTC, datetime, timedelta

from windlass.store.memory import MemoryStore
from windlass.store.port import Store
from windlass.testing import StoreContract


class TestMemoryStore(StoreContract):
    capabilities = frozenset({"concurrent_writers", "wakeups"})

    async def open_store(self) -> Store:
        self.now = datetime(2026, 11, 15, 20, tzinfo=UTC)
        store = MemoryStore(clock=lambda: self.now)
        await store.open()
        return store

    async def close_store(self, store: Store) -> None:
        await store.close()

    async def advance(self, store: Store, delta: timedelta) -> None:
        self.now += delta
