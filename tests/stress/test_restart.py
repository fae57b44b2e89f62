"""Workers are killed for a minute and the server once: every task completes exactly once."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.fleet import Fleet
from chaos.server import ChaosServer
from windlass import App
from windlass.testing.history_check import check, read_history, record
from windlass.testing.history_check.events import Ended

WORKERS = 4
TASKS = 20_000
SECONDS = 60.0  # of kills
DEADLINE = 300.0
REGISTERED = "SELECT count(*) FROM windlass.worker WHERE pid = ANY ($1)"
LEFT = "SELECT count(*) FROM windlass.task"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ChaosServer]:
    server = ChaosServer(tmp_path / "server")
    yield server
    server.release()
    assert server.leftovers() == []


@pytest.mark.stress
@pytest.mark.timeout(600)
async def test_a_minute_of_kills_and_a_restart_double_or_lose_none_of_20000_tasks(
    server: ChaosServer, tmp_path: Path
) -> None:
    seed = random.randrange(2**32)
    print(f"\nseed {seed}")
    chance = random.Random(seed)
    async with App(server.url) as app:
        recorder = await server.connect()
        await record(recorder)
        await recorder.close()

        @app.task(name="short", retry=100)
        async def short(milliseconds: int) -> int:
            return milliseconds

        sleeps = [chance.randint(20, 150) for _ in range(TASKS)]
        handles = await app.enqueue_many([short.call(milliseconds=sleep) for sleep in sleeps])
    fleet = Fleet(server.url, tmp_path, "chaos.application:app", WORKERS)
    try:
        await rage(server, fleet, chance)
        await drain(server, fleet)
        codes = await asyncio.to_thread(fleet.terminate)
        assert codes == [0] * WORKERS, fleet.log.read_text()[-5000:]
    finally:
        fleet.end()

    connection = await server.connect()
    history = await read_history(connection, runs=[tmp_path / "runs.jsonl"])
    ends = [event for event in history.events if isinstance(event, Ended)]
    print(f"{len(fleet.deaths)} kills, {len(history.runs) - TASKS} runs were lost")
    assert check(history) == []
    assert {end.state for end in ends} == {"completed"}
    assert Counter(end.task for end in ends) == Counter(handle.id for handle in handles)
    for place in ("ready", "scheduled", "claim", "claim_task", "running", "attempt", "task"):
        assert await connection.fetchval(f"SELECT count(*) FROM windlass.{place}") == 0, place
    await connection.close()
    assert "Traceback" not in fleet.log.read_text()


async def rage(server: ChaosServer, fleet: Fleet, chance: random.Random) -> None:
    began = time.monotonic()
    has_restarted = False
    while time.monotonic() - began < SECONDS:
        await asyncio.sleep(1)  # the pace of the kills, not a wait for anything
        fleet.kill(chance.randrange(WORKERS))
        if time.monotonic() - began > SECONDS / 2 and not has_restarted:
            await server.restart_by("immediate")
            has_restarted = True
        assert fleet.ended_by_themselves() == [], fleet.log.read_text()[-5000:]


async def drain(server: ChaosServer, fleet: Fleet) -> None:
    began = time.monotonic()
    connection = await server.connect()
    while (
        await connection.fetchval(LEFT)
        or await connection.fetchval(REGISTERED, fleet.pids()) < WORKERS
    ):
        assert time.monotonic() - began < DEADLINE, "tasks are left"
        await asyncio.sleep(0.1)
    await connection.close()
