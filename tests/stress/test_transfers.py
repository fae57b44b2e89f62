"""Money moves once for each task, whatever is killed, stopped or cut off meanwhile."""

import asyncio
import random
import time
from pathlib import Path

import asyncpg
import pytest

from chaos.fleet import Fleet
from windlass import App

WORKERS = 3
TRANSFERS = 2_000
STAND_STILL = 5.0  # seconds, longer than the lease
DEADLINE = 300.0
TYPES = ("on_a_connection_of_ours", "on_its_own_connection", "in_a_thread")

LEFT = "SELECT count(*) FROM windlass.task"
CUT = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid() AND random() < 0.3
"""


async def until_registered(connection: asyncpg.Connection, fleet: Fleet) -> None:
    async with asyncio.timeout(60):
        while True:
            known = {
                row["pid"] for row in await connection.fetch("SELECT pid FROM windlass.worker")
            }
            if known >= set(fleet.pids()):
                return
            await asyncio.sleep(0.05)


@pytest.mark.stress
@pytest.mark.timeout(600)
@pytest.mark.needs_direct("its own sessions are cut, and not those of a pooler")
async def test_every_transfer_happens_once(database_url: str, tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print(f"\nseed {seed}")
    chance = random.Random(seed)
    connection = await asyncpg.connect(database_url)
    await connection.execute(
        """
        CREATE TABLE account (id integer PRIMARY KEY, balance integer NOT NULL);
        CREATE TABLE transfer (n integer NOT NULL);
        INSERT INTO account SELECT n, 1000 FROM generate_series(0, 99) AS n;
        """
    )
    async with App(database_url) as app:
        for n in range(TRANSFERS):
            await app.enqueue(TYPES[n % 3], {"n": n}, max_attempts=100)
    fleet = Fleet(database_url, tmp_path, "stress.transfer_app:app", WORKERS)
    kills = stops = cuts = 0
    began = time.monotonic()
    try:
        while await connection.fetchval(LEFT) and time.monotonic() - began < DEADLINE:
            await asyncio.sleep(0.3)  # the pace of the faults, not a wait for anything
            victim = chance.randrange(WORKERS)
            match chance.randrange(4):
                case 0:
                    fleet.kill(victim)
                    kills += 1
                case 1:
                    later = asyncio.get_running_loop().call_later
                    later(STAND_STILL, fleet.resume, fleet.stop(fleet.pids()[victim]))
                    stops += 1
                case _:
                    cuts += len(await connection.fetch(CUT))
        took = time.monotonic() - began
        for pid in fleet.pids():
            fleet.resume(pid)
        await until_registered(connection, fleet)  # or a signal ends one that has just been started
        codes = await asyncio.to_thread(fleet.terminate)
        assert codes == [0] * WORKERS, fleet.log.read_text()[-5000:]
    finally:
        fleet.end()

    print(f"{TRANSFERS} transfers in {took:.0f} s, {kills} kills, {stops} stops, {cuts} cuts")
    statuses = await connection.fetch("SELECT DISTINCT status::text FROM windlass.tasks")
    assert [row[0] for row in statuses] == ["completed"]
    assert await connection.fetchval("SELECT sum(balance) FROM account") == 100_000
    moved = await connection.fetch("SELECT n FROM transfer ORDER BY n")
    assert [row[0] for row in moved] == list(range(TRANSFERS))
    for place in ("ready", "claim", "claim_task", "completed_within", "running", "attempt"):
        assert await connection.fetchval(f"SELECT count(*) FROM windlass.{place}") == 0, place
    assert min(kills, stops, cuts) > 0
    await connection.close()
