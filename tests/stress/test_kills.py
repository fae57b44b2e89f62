"""Workers are killed while they work; every task is counted in and out."""

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from chaos.fleet import Fleet
from windlass import App, Task

WORKERS = 4
SHORT = 40_000
LONG = 60
LEAST_HITS = 20
DEADLINE = 300.0


REGISTERED = "SELECT count(*) FROM windlass.worker WHERE pid = ANY ($1)"
HELD = """
SELECT count(*) FROM windlass.worker w JOIN windlass.claim c ON c.worker_id = w.id
WHERE w.pid = $1
"""
LEFT = "SELECT count(*) FROM windlass.task"


@pytest.mark.stress
@pytest.mark.timeout(600)
async def test_every_task_completes_exactly_once_while_workers_are_killed(
    database_url: str, tmp_path: Path
) -> None:
    seed = random.randrange(2**32)
    print(f"\nseed {seed}")
    chance = random.Random(seed)
    app = App(database_url)
    sleeps = [chance.randint(1, 20) for _ in range(SHORT)]
    async with app:
        tasks = _tasks(app)
        ids = {
            handle.id
            for handle in await app.enqueue_many(
                [tasks[0].call(milliseconds=sleep) for sleep in sleeps]
                + [tasks[1].options(priority="high").call(seconds=2.0) for _ in range(LONG)]
            )
        }
    connection = await asyncpg.connect(database_url)
    fleet = Fleet(database_url, tmp_path, "stress.kill_app:app", WORKERS)
    hits = 0
    began = time.monotonic()
    try:
        while await connection.fetchval(LEFT) and time.monotonic() - began < DEADLINE:
            await asyncio.sleep(1)  # the pace of the kills, not a wait for anything
            victim = chance.randrange(WORKERS)
            hits += bool(await connection.fetchval(HELD, fleet.pids()[victim]))
            fleet.kill(victim)
        took = time.monotonic() - began
        while await connection.fetchval(REGISTERED, fleet.pids()) < WORKERS:
            await asyncio.sleep(0.05)
        codes = await asyncio.to_thread(fleet.terminate)
        assert codes == [0] * WORKERS, fleet.log.read_text()[-5000:]
    finally:
        fleet.end()

    assert "Traceback" not in fleet.log.read_text()
    ended = await connection.fetch(
        "SELECT id::text, status::text, attempts, max_attempts, generation FROM windlass.tasks"
    )
    recovered = sum(row["generation"] > 1 for row in ended)
    lost_attempts = sum(row["attempts"] - 1 for row in ended)
    print(
        f"{len(ids)} tasks in {took:.0f} s, {len(fleet.deaths)} kills, {hits} of them on claimed work, "
        f"{recovered} tasks recovered, {lost_attempts} attempts lost with their worker"
    )
    assert len(ended) == len(ids)
    assert {row["id"] for row in ended} == ids
    assert {row["status"] for row in ended} == {"completed"}
    assert all(row["attempts"] <= row["max_attempts"] for row in ended)
    assert hits >= LEAST_HITS
    assert recovered > 0
    for place in ("ready", "scheduled", "claim", "claim_task", "running", "attempt"):
        assert await connection.fetchval(f"SELECT count(*) FROM windlass.{place}") == 0, place
    await connection.close()


def _tasks(app: App) -> tuple[Task[..., Any], Task[..., Any]]:
    @app.task
    async def short(milliseconds: int) -> int:
        return milliseconds

    @app.task(retry=30)
    async def long(seconds: float) -> float:
        return seconds

    return short, long
