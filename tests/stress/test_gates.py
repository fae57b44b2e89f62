"""Eight workers, kills, and gates: no limit is exceeded, no key overtaken, no place lost."""

import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from chaos.fleet import Fleet
from stress.gated_app import CONCURRENCY, SECONDS, app, both, nap, one, step

WORKERS = 8
TENANTS = 6
NAPS = 1800
KEYS = 100_000
STEPS = 110_000  # so some keys have several
DEADLINE = 400.0

# What workers hold at each gate, by what claims say of tasks and not by what counts it.
HELD = """
SELECT
    (
        SELECT coalesce(max(h.tasks), 0)
        FROM (
            SELECT count(*) AS tasks
            FROM windlass.claim_task b
            CROSS JOIN LATERAL unnest(b.task_ids, b.generations) AS u (task_id, generation)
            JOIN windlass.task t ON t.id = u.task_id AND t.generation = u.generation
            JOIN windlass.task_gate g ON g.task_id = t.id
            GROUP BY coalesce(g.order_gate, g.limit_gate)
        ) h
    ) AS most,
    (SELECT count(*) FROM windlass.history) AS ended
"""
# What is left at gates once everything has ended.
LEFT = """
SELECT
    (SELECT count(*) FROM windlass.gate), (SELECT count(*) FROM windlass.gate_entry),
    (SELECT count(*) FROM windlass.gate_call), (SELECT count(*) FROM windlass.task)
"""
# Tasks of a key that were claimed for their last attempt before the one before them had ended.
OVERTAKEN = """
SELECT count(*), count(*) FILTER (WHERE k.before IS NOT NULL)
FROM (
    SELECT h.claimed_at, lag(h.completed_at) OVER (PARTITION BY g.ordering_key ORDER BY h.id) AS before
    FROM windlass.history h
    JOIN windlass.task_gate g ON g.task_id = h.id
) k
WHERE k.before IS NULL OR k.claimed_at < k.before
"""


class Course:
    """What is sampled while workers run, some of whom are killed."""

    def __init__(self, connection: asyncpg.Connection, fleet: Fleet, *, kills: bool) -> None:
        self._connection = connection
        self._fleet = fleet
        self._kills = kills
        self._chance = random.Random(random.randrange(2**32))
        self.samples: list[tuple[float, int]] = []
        self.most = 0

    async def run(self, tasks: int, allowed: int) -> None:
        killed_at = time.monotonic()
        deadline = killed_at + DEADLINE
        while not self.samples or self.samples[-1][1] < tasks:
            seen = await self._connection.fetchrow(HELD)
            self.most = max(self.most, seen["most"])
            assert seen["most"] <= allowed
            self.samples.append((time.monotonic(), seen["ended"]))
            assert time.monotonic() < deadline, seen
            if self._kills and time.monotonic() > killed_at + 2:
                self._fleet.kill(self._chance.randrange(WORKERS))
                killed_at = time.monotonic()
            await asyncio.sleep(0.05)  # the pace of the samples, not a wait for anything


async def sampled(
    url: str, folder: Path, calls: Callable[[], Any], tasks: int, allowed: int, *, kills: bool
) -> tuple[Course, asyncpg.Connection]:
    with app.kept_at(url):
        await app.enqueue_many(calls())
        await app.close()
    connection = await asyncpg.connect(url)
    fleet = Fleet(url, folder, "stress.gated_app:app", WORKERS)
    course = Course(connection, fleet, kills=kills)
    try:
        await course.run(tasks, allowed)
        fleet.kill(0)  # who leads may have calls left: another one goes on
        async with asyncio.timeout(60):
            while tuple(await connection.fetchrow(LEFT)) != (0, 0, 0, 0):
                await asyncio.sleep(0.1)
    finally:
        fleet.end()
    return course, connection


@pytest.mark.stress
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kills", [False, True], ids=["quiet", "kills"])
async def test_a_limit_by_value_is_kept_and_used_up(
    database_url: str, tmp_path: Path, kills: bool
) -> None:
    course, connection = await sampled(
        database_url,
        tmp_path,
        lambda: (nap.call(number % TENANTS) for number in range(NAPS)),
        NAPS,
        CONCURRENCY,
        kills=kills,
    )

    inner = [one for one in course.samples if NAPS / 4 <= one[1] <= NAPS - TENANTS * CONCURRENCY]
    (began, first), (until, last) = inner[0], inner[-1]
    share = (last - first) / (until - began) * SECONDS / CONCURRENCY / TENANTS
    print(f"\nkills={kills}: at most {course.most}, {share:.2f} of what the limits let through")
    assert course.most == CONCURRENCY
    await connection.close()


@pytest.mark.stress
@pytest.mark.timeout(900)
async def test_a_hundred_thousand_keys_keep_their_order_through_retries_and_kills(
    database_url: str, tmp_path: Path
) -> None:
    course, connection = await sampled(
        database_url,
        tmp_path,
        lambda: (
            step.options(ordering_key=f"key {number % KEYS}").call(number)
            for number in range(STEPS)
        ),
        STEPS,
        1,
        kills=True,
    )

    seconds = course.samples[-1][0] - course.samples[0][0]
    print(f"\n{STEPS} tasks of {KEYS} keys in {seconds:.0f} s")
    firsts, overtaken = await connection.fetchrow(OVERTAKEN)
    assert (firsts, overtaken) == (KEYS, 0)
    await connection.close()


HELD_BY_TYPE = """
SELECT h.type, max(h.tasks), sum(h.tasks)
FROM (
    SELECT t.type, g.limit_gate, count(*) AS tasks
    FROM windlass.claim_task b
    CROSS JOIN LATERAL unnest(b.task_ids, b.generations) AS u (task_id, generation)
    JOIN windlass.task t ON t.id = u.task_id AND t.generation = u.generation
    JOIN windlass.task_gate g ON g.task_id = t.id
    GROUP BY t.type, g.limit_gate
) h
GROUP BY h.type
"""
DEADLOCKS = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
COMING_FOR = 15.0  # seconds


async def enqueue(chance: random.Random) -> int:
    """Add a few tasks at a time, so that gates are removed as others come to them."""
    number = 0
    until = time.monotonic() + COMING_FOR
    while time.monotonic() < until:
        task = chance.choice([one, both])
        await app.enqueue_many(task.call(chance.randrange(4)) for _ in range(3))
        number += 3
        await asyncio.sleep(chance.random() * 0.03)  # the pace of the tasks
    return number


@pytest.mark.stress
@pytest.mark.timeout(300)
async def test_limits_by_value_hold_while_gates_come_and_go(
    database_url: str, tmp_path: Path
) -> None:
    seed = random.randrange(2**32)
    connection = await asyncpg.connect(database_url)
    most = {"one": 0, "both": 0}
    with app.kept_at(database_url):
        await app.queues.rules()  # a call opens the app, and so migrates
        fleet = Fleet(database_url, tmp_path, "stress.gated_app:app", 3)
        try:
            coming = [
                asyncio.create_task(enqueue(random.Random(seed + place))) for place in range(3)
            ]
            while not all(task.done() for task in coming):
                for of, at_once, in_all in await connection.fetch(HELD_BY_TYPE):
                    most[of] = max(most[of], at_once)
                    assert at_once <= {"one": 1, "both": 2}[of], f"seed {seed}"
                    assert of == "one" or in_all <= 8, f"seed {seed}"
                await asyncio.sleep(0.002)  # the pace of the samples
            number = sum(task.result() for task in coming)
            async with asyncio.timeout(30):
                while await connection.fetchval("SELECT count(*) FROM windlass.task"):
                    await asyncio.sleep(0.05)
            codes = await asyncio.to_thread(fleet.terminate)
        finally:
            fleet.end()
            await app.close()

    assert codes == [0, 0, 0]
    assert most == {"one": 1, "both": 2}
    assert await connection.fetchval("SELECT count(*) FROM windlass.history") == number
    assert await connection.fetchval(DEADLOCKS) == 0
    print(f"\nseed {seed}: {number} tasks")
    await connection.close()
