"""The history checker finds an engine that is broken on purpose, and finds nothing otherwise."""

from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest

from contract.postgres_sessions import LEASE, SECOND, TERM, WORKER, Sessions, add
from faults.mutants import MUTANTS, World
from windlass.store.postgres.store import PostgresStore
from windlass.testing.history_check import ClientLog, Violation, check, read_history, record


@pytest.fixture
async def world(
    database_url: str,
    sql_url: str,
    watcher: asyncpg.Connection,
    postgres_store: PostgresStore,
    tmp_path: Path,
) -> AsyncIterator[World]:
    sessions = Sessions(database_url, sql_url, watcher)
    await record(sessions.watcher)
    client = ClientLog(tmp_path / "calls.jsonl")
    yield World(postgres_store, sessions, client)
    client.close()
    await sessions.close()


@pytest.fixture
def calls(tmp_path: Path) -> Path:
    return tmp_path / "calls.jsonl"


async def found(world: World, calls: Path) -> list[Violation]:
    history = await read_history(world.sessions.watcher, calls=[calls])
    assert history.events or history.calls
    return check(history)


@pytest.mark.parametrize("name", MUTANTS)
async def test_the_checker_finds_what_is_broken(name: str, world: World, calls: Path) -> None:
    mutant = MUTANTS[name]
    await mutant.breaks(world)

    await mutant.run(world)

    assert {violation.rule for violation in await found(world, calls)} == {mutant.rule}


@pytest.mark.parametrize("name", MUTANTS)
async def test_the_same_run_is_clean_on_the_engine_as_it_is(
    name: str, world: World, calls: Path
) -> None:
    mutant = MUTANTS[name]

    await (mutant.unbroken or mutant.run)(world)

    assert await found(world, calls) == []


async def test_a_rescue_by_who_holds_no_seat_is_found(world: World, calls: Path) -> None:
    await add(world.store)
    await world.granted(WORKER)
    await world.sessions.advance(LEASE + SECOND)

    await world.store.rescue(1000)

    assert [violation.rule for violation in await found(world, calls)] == ["I10"]


async def test_a_rescue_that_shares_the_seat_with_another_chore_is_seen_to_hold_it(
    world: World, calls: Path
) -> None:
    await add(world.store)
    await world.granted(WORKER)
    await world.sessions.advance(LEASE + SECOND)
    leadership = await world.store.lead(WORKER, current=None, term=TERM)
    assert leadership is not None
    other = await world.sessions.begin()
    await other.store.tidy(leadership=leadership)

    await world.store.rescue(1000, leadership=leadership)

    assert await found(world, calls) == []
