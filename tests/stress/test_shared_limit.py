"""Eight workers share a limit: it is never exceeded, and what it lets through is used."""

import asyncio
import random
import time
from pathlib import Path

import asyncpg
import pytest

from chaos.fleet import Fleet
from stress.limited_app import CONCURRENCY, SECONDS, app, nap

WORKERS = 8
TASKS = 1200
DEADLINE = 240.0

# What is held, by what claims say of tasks and not by what counts it.
HELD = """
SELECT
    (
        SELECT count(*)
        FROM windlass.claim_task b
        CROSS JOIN LATERAL unnest(b.task_ids, b.generations) AS k (task_id, generation)
        JOIN windlass.task t ON t.id = k.task_id AND t.generation = k.generation
    ) AS held,
    (SELECT count(*) FROM windlass.history) AS ended,
    (SELECT coalesce(sum(h.remaining), 0) FROM windlass.claim_limit h) AS counted,
    (SELECT u.used FROM windlass.limit_use u ORDER BY u.version DESC LIMIT 1) AS used
"""
REGISTERED = "SELECT count(*) FROM windlass.worker WHERE pid = ANY ($1)"


@pytest.mark.stress
@pytest.mark.timeout(600)
@pytest.mark.parametrize("course", ["quiet", "old snapshot", "kills"])
async def test_a_limit_is_kept_and_used_up(database_url: str, tmp_path: Path, course: str) -> None:
    seed = random.randrange(2**32)
    chance = random.Random(seed)
    with app.kept_at(database_url):
        await app.enqueue_many(nap.call() for _ in range(TASKS))
        await app.close()
    connection = await asyncpg.connect(database_url)
    reader = await asyncpg.connect(database_url)
    if course == "old snapshot":
        await reader.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        await reader.fetch("SELECT count(*) FROM windlass.limit_use")
    fleet = Fleet(database_url, tmp_path, "stress.limited_app:app", WORKERS)
    samples: list[tuple[float, int]] = []
    most = 0
    killed_at = time.monotonic()
    deadline = killed_at + DEADLINE
    try:
        while not samples or samples[-1][1] < TASKS:
            seen = await connection.fetchrow(HELD)
            most = max(most, seen["held"])
            assert seen["held"] <= CONCURRENCY
            assert (seen["used"] or 0) == seen["counted"]
            samples.append((time.monotonic(), seen["ended"]))
            assert time.monotonic() < deadline, f"seed {seed}: {seen}"
            if course == "kills" and time.monotonic() > killed_at + 2:
                fleet.kill(chance.randrange(WORKERS))
                killed_at = time.monotonic()
            await asyncio.sleep(0.02)  # the pace of the samples, not a wait for anything
        while await connection.fetchval(REGISTERED, fleet.pids()) < WORKERS:
            await asyncio.sleep(0.05)
        assert await asyncio.to_thread(fleet.terminate) == [0] * WORKERS
    finally:
        fleet.end()

    rate = _rate([one for one in samples if TASKS / 4 <= one[1] <= TASKS - CONCURRENCY])
    print(f"\n{course}: at most {most} at once, {rate:.2f} of what the limit lets through")
    assert most == CONCURRENCY
    after = await connection.fetchrow(HELD)
    assert (after["held"], after["counted"], after["used"]) == (0, 0, 0)
    assert await connection.fetchval("SELECT count(*) FROM windlass.claim_limit") == 0
    await reader.close()
    await connection.close()


def _rate(samples: list[tuple[float, int]]) -> float:
    """What has ended, as a share of what the limit lets through in that time."""
    (began, first), (until, last) = samples[0], samples[-1]
    return (last - first) / (until - began) * SECONDS / CONCURRENCY
