"""A store whose statements are measured."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import asyncpg
import pytest

from architecture.plan_costs import FULL, Subject, fill
from windlass.store.postgres import claiming, cursors
from windlass.testing.databases import drop_database, make_database


@pytest.fixture
async def subject(database_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Subject]:
    async with _measured(database_url, monkeypatch) as subject:
        yield subject


@pytest.fixture
async def full(
    server_url: str, full_template: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Subject]:
    """The same with a hundred thousand tasks, of which no statistics were made."""
    url = await make_database(server_url, full_template)
    async with _measured(url, monkeypatch) as subject:
        yield subject
    await drop_database(url)


@pytest.fixture(scope="session")
def full_template(server_url: str, template: str) -> Iterator[str]:
    """A database to copy: ten times as quick as to fill each anew."""
    url = asyncio.run(_make_full(server_url, template))
    yield urlsplit(url).path.removeprefix("/")
    asyncio.run(drop_database(url))


async def _make_full(server_url: str, template: str) -> str:
    url = await make_database(server_url, template)
    connection = await asyncpg.connect(url)
    await _without_autovacuum(connection)
    await fill(connection, 0, FULL)
    await connection.close()
    return url


async def _without_autovacuum(connection: asyncpg.Connection) -> None:
    """It would come and go as it likes."""
    for table in ("task", "ready", "scheduled", "claim", "claim_task"):
        await connection.execute(f"ALTER TABLE windlass.{table} SET (autovacuum_enabled = off)")


@asynccontextmanager
async def _measured(url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Subject]:
    # It would come in between, on the one session there is.
    monkeypatch.setattr(claiming, "LOOK_BEHIND_EVERY", 3600.0)
    connection = await asyncpg.connect(url, server_settings={"jit": "off"})
    await _without_autovacuum(connection)
    subject = Subject(url, connection)
    await subject.store.open()
    await subject.store._history.prepare()
    pool = subject.store._run.pool
    yield subject
    subject.store._run.pool = pool
    await subject.store.close()
    await connection.close()


@pytest.fixture
def no_foreign_writers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pass at once what other tests write at the same time: it holds the bound for a second."""
    monkeypatch.setattr(cursors, "PASS_AFTER", 0.0)
