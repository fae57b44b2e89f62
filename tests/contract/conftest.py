"""Fixtures that several files of contract tests use."""

from collections.abc import AsyncIterator

import asyncpg
import pytest

from contract.postgres_keeper import NOON, Keeper
from contract.postgres_sessions import Sessions
from windlass.store.postgres import history as history_module
from windlass.store.postgres.store import PostgresStore


@pytest.fixture
async def sessions(
    postgres_store: PostgresStore, database_url: str, sql_url: str
) -> AsyncIterator[Sessions]:
    # A session in the middle of a transaction could not make a missing place and try again.
    await postgres_store._history.prepare()
    sessions = Sessions(database_url, sql_url, await asyncpg.connect(sql_url))
    yield sessions
    await sessions.close()


@pytest.fixture
def store(postgres_store: PostgresStore) -> PostgresStore:
    return postgres_store


@pytest.fixture
async def keeper(
    postgres_store: PostgresStore, database_url: str, sql_url: str
) -> AsyncIterator[Keeper]:
    keeper = Keeper(postgres_store, await asyncpg.connect(sql_url), database_url, sql_url)
    await keeper.at(NOON)
    yield keeper
    await keeper.close()


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let retention wait for readers only long enough to be seen waiting."""
    monkeypatch.setattr(history_module, "DETACH_WITHIN", 1.0)
