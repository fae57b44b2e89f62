"""What `windlass migrate` says: that nothing is pending, and what stands in its way."""

import asyncio
import logging
from collections.abc import Iterator

import asyncpg
import pytest
from click.testing import CliRunner

from contract.pgbouncer import store_options
from windlass.cli import main
from windlass.store.postgres import schema
from windlass.store.postgres.store import PostgresStore
from windlass.store.sqlfiles import SqlFiles


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture
def short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    read = SqlFiles.statement
    monkeypatch.setattr(
        SqlFiles, "statement", lambda files, name: read(files, name).replace("'5s'", "'50ms'")
    )


async def hold(url: str, sql_url: str) -> asyncpg.Connection:
    """Apply all that was before the third migration, and hold a table that it changes."""
    store = PostgresStore(store_options(url))
    session = await asyncpg.connect(sql_url, server_settings={"application_name": "a report"})
    await session.execute(store.schema.script(store._sql.migrations()[:2]))
    await session.execute("BEGIN; LOCK TABLE windlass.lane IN ACCESS SHARE MODE")
    return session


class Waits(logging.Handler):
    """Hears in the log that a migration waits for another one."""

    def __init__(self) -> None:
        super().__init__()
        self.told = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith("migration.waiting schema=windlass"):
            self.told.set()


async def test_who_waits_for_another_migration_says_so(
    empty_database_url: str, empty_sql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "TELL_AFTER", 0.05)
    store = PostgresStore(store_options(empty_database_url))
    session = await asyncpg.connect(empty_sql_url)
    await session.execute("BEGIN;" + store._sql.statement("lock_migrations"))
    waits = Waits()
    logging.getLogger("windlass").addHandler(waits)

    try:
        migrating = asyncio.create_task(store.schema.migrate())
        await asyncio.wait_for(waits.told.wait(), 10)
        await session.execute("COMMIT")
        assert await migrating
    finally:
        logging.getLogger("windlass").removeHandler(waits)
        await session.close()


@pytest.mark.usefixtures("short_wait")
def test_a_migration_behind_a_lock_is_named_with_who_holds_it_and_the_way_out(
    empty_database_url: str,
    empty_sql_url: str,
    monkeypatch: pytest.MonkeyPatch,
    runner: asyncio.Runner,
) -> None:
    monkeypatch.setenv("WINDLASS_DATABASE_URL", empty_database_url)
    session = runner.run(hold(empty_database_url, empty_sql_url))

    done = CliRunner().invoke(main, ["migrate"])
    runner.run(session.execute("COMMIT"))
    again = CliRunner().invoke(main, ["migrate"])

    assert done.exit_code == 1, done.exception
    assert "migration 0003_lanes_and_plans was not applied" in done.stderr
    assert f"{session.get_server_pid()} (a report)" in done.stderr
    assert "then run: windlass migrate" in done.stderr
    assert done.stderr.count("\n") == 1
    assert "applied: 0003_lanes_and_plans" in again.stdout
    runner.run(session.close())
