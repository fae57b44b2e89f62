"""An enqueue returns when its task is on the disk, also if a worker may see it before."""

import asyncpg
import pytest

from contract.postgres_sessions import LEASE, WORKER, Sessions, add, new_task, worker_info
from windlass.store.postgres.store import PostgresStore

WRITTEN = "SELECT pg_current_wal_insert_lsn() - '0/0'"
ON_DISK = "SELECT pg_current_wal_flush_lsn() - '0/0'"


@pytest.fixture
def watcher(sessions: Sessions) -> asyncpg.Connection:
    return sessions.watcher


@pytest.mark.parametrize("is_awaited", [True, False])
async def test_an_enqueue_returns_when_its_task_is_on_the_disk(
    store: PostgresStore, watcher: asyncpg.Connection, is_awaited: bool
) -> None:
    await store.register(worker_info(), lease=LEASE)
    await store.set_idle(WORKER, is_awaited)
    await add(store)
    for _ in range(20):
        before = await watcher.fetchval(WRITTEN)
        await add(store)
        assert await watcher.fetchval(ON_DISK) > before + 300  # a task takes more of the log


async def test_a_repeated_enqueue_that_finds_its_task_returns_when_that_is_on_the_disk(
    store: PostgresStore, watcher: asyncpg.Connection
) -> None:
    task = new_task()
    await store.enqueue([task])
    for _ in range(5):
        before = await watcher.fetchval(WRITTEN)
        await store.enqueue([task], repeated=True)
        assert await watcher.fetchval(ON_DISK) > before
