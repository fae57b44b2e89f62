"""A store whose statements are measured."""

from collections.abc import AsyncIterator

import asyncpg
import pytest

from architecture.plan_costs import (
    Subject,
)
from windlass.store.postgres import claiming, cursors


@pytest.fixture
async def subject(database_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Subject]:
    # It would come in between, on the one session there is.
    monkeypatch.setattr(claiming, "LOOK_BEHIND_EVERY", 3600.0)
    connection = await asyncpg.connect(database_url, server_settings={"jit": "off"})
    # Autovacuum would come and go as it likes.
    for table in ("task", "ready", "scheduled", "claim", "claim_task"):
        await connection.execute(f"ALTER TABLE windlass.{table} SET (autovacuum_enabled = off)")
    subject = Subject(database_url, connection)
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
