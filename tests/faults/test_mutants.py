"""The history checker finds an engine that is broken on purpose, and finds nothing otherwise."""

from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest

from contract.postgres_sessions import LEASE, SECOND, TERM, WORKER, Sessions, add
from faults.mutants import MUTANTS, Engine
from windlass.store.postgres.store import PostgresStore
from windlass.testing.history_check import ClientLog, Violation, check, read_history, record


@pytest.fixture
async def engine(
    database_url: str,
    sql_url: str,
    watcher: asyncpg.Connection,
    postgres_store: PostgresStore,
    tmp_path: Path,
) -> AsyncIterator[Engine]:
    sessions = Sessions(database_url, sql_url, watcher)
    await record(sessions.watcher)
    client = ClientLog(tmp_path / "calls.jsonl")
    yield Engine(postgres_store, sessions, client)
    client.close()
    await sessions.close()


@pytest.fixture
def calls(tmp_path: Path) -> Path:
    return tmp_path / "calls.jsonl"


async def found(engine: Engine, calls: Path) -> list[Violation]:
    history = await read_history(engine.sessions.watcher, calls=[calls])
    assert history.events or history.calls
    return check(history)


@pytest.mark.parametrize("name", MUTANTS)
async def test_the_checker_finds_what_is_broken(name: str, engine: Engine, calls: Path) -> None:
    mutant = MUTANTS[name]
    await mutant.breaks(engine)

    await mutant.run(engine)

    assert {violation.rule for violation in await found(engine, calls)} == {mutant.rule}


@pytest.mark.parametrize("name", MUTANTS)
async def test_the_same_run_is_clean_on_the_engine_as_it_is(
    name: str, engine: Engine, calls: Path
) -> None:
    mutant = MUTANTS[name]

    await (mutant.unbroken or mutant.run)(engine)

    assert await found(engine, calls) == []


async def test_a_rescue_by_who_holds_no_seat_is_found(engine: Engine, calls: Path) -> None:
    await add(engine.store)
    await engine.granted(WORKER)
    await engine.sessions.advance(LEASE + SECOND)

    await engine.store.rescue(1000)

    assert [violation.rule for violation in await found(engine, calls)] == ["I10"]


async def test_a_rescue_that_shares_the_seat_with_another_chore_is_seen_to_hold_it(
    engine: Engine, calls: Path
) -> None:
    await add(engine.store)
    await engine.granted(WORKER)
    await engine.sessions.advance(LEASE + SECOND)
    leadership = await engine.store.lead(WORKER, current=None, term=TERM)
    assert leadership is not None
    other = await engine.sessions.begin()
    await other.store.tidy(leadership=leadership)

    await engine.store.rescue(1000, leadership=leadership)

    assert await found(engine, calls) == []
