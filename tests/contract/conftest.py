"""Fixtures of the tests with several sessions."""

from collections.abc import AsyncIterator

import asyncpg
import pytest

from contract.postgres_sessions import Sessions
from windlass.store.postgres.store import PostgresStore


@pytest.fixture
async def sessions(postgres_store: PostgresStore, database_url: str) -> AsyncIterator[Sessions]:
    # A session in the middle of a transaction could not make a missing place and try again.
    await postgres_store._history.prepare()
    sessions = Sessions(database_url, await asyncpg.connect(database_url))
    yield sessions
    await sessions.close()


@pytest.fixture
def store(postgres_store: PostgresStore) -> PostgresStore:
    return postgres_store
