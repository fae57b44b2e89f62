"""Tasks that fail in every way, and workers that are killed: each task ends as its policy says, and says how."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from chaos.fleet import Fleet
from stress import failing_app
from windlass import App

WORKERS = 4
DEADLINE = 400.0
APPLICATION = "stress.failing_app:app"
LEFT = "SELECT count(*) FROM windlass.task"
REGISTERED = "SELECT count(*) FROM windlass.worker WHERE pid = ANY ($1)"
ENDED = """
SELECT id::text, type, status::text, attempts, max_attempts, errors FROM windlass.history
UNION ALL SELECT id::text, type, status::text, attempts, max_attempts, errors FROM windlass.dead
"""
LOST = "WorkerLost"


@dataclass(frozen=True, slots=True)
class Policy:
    """What has to become of a task, whatever happens to its workers: they cost attempts, and change nothing else."""

    status: str
    errors: tuple[str, ...] = ()  # of its own attempts, in this order
    kind: str = ""  # the class of the last

    def broken_by(self, row: asyncpg.Record) -> str:
        """Say what is wrong, if anything is."""
        errors = [] if row["errors"] is None else json.loads(row["errors"])
        own = tuple(error["type"] for error in errors if error["type"] != LOST)
        lost = len(errors) - len(own)
        # Attempts that were lost with their worker may have been the last that it had.
        may_die = lost > 0 and row["attempts"] == row["max_attempts"]
        is_early = may_die and row["status"] == "dead"
        attempts = len(errors) + (row["status"] == "completed")
        rules = {
            "status": row["status"] == self.status or is_early,
            "number of attempts": row["status"] == "cancelled" or row["attempts"] == attempts,
            "each attempt": [error["attempt"] for error in errors] == [*range(1, len(errors) + 1)],
            "all of each attempt": all(map(_is_whole, errors)),
            "errors": own == self.errors[: len(own)] and (lost > 0 or len(own) == len(self.errors)),
            "class": not self.kind or is_early or errors[-1]["class"] == self.kind,
        }
        wrong = [name for name, is_so in rules.items() if not is_so]
        return f"{wrong}: {row['status']} {errors}" if wrong else ""


def _is_whole(error: dict[str, Any]) -> bool:
    began, ended = (datetime.fromisoformat(error[one]) for one in ("started_at", "ended_at"))
    return began <= ended and bool(error["worker_id"]) and bool(error["message"])


TIMEOUT = ("TimeoutError",) * 3
DIED = ("ProcessDied",) * 3
POLICIES = {
    "good": Policy("completed"),
    "good_thread": Policy("completed"),
    "good_process": Policy("completed"),
    "recovers": Policy("completed", ("ConnectionError",) * 2),
    "asks_for_time": Policy("completed", ("RetryAfter",)),
    "snoozes": Policy("completed"),
    "unreachable": Policy("dead", ("ConnectionError",) * 3),
    "odd": Policy("dead", ("Odd",) * 3),
    "sleeps": Policy("dead", TIMEOUT),
    "sleeps_in_a_thread": Policy("dead", TIMEOUT),
    "blocks": Policy("dead", TIMEOUT),
    "hangs_in_a_process": Policy("dead", TIMEOUT),
    "crashes_its_process": Policy("dead", DIED),
    "exits": Policy("dead", DIED),
    "wrong_program": Policy("failed", ("KeyError",), "code-bug"),
    "refuses": Policy("failed", ("Fail",)),
    "wants_a_number": Policy("failed", ("PayloadError",), "permanent-input"),
    "returns_nonsense": Policy("failed", ("PayloadError",), "code-bug"),
    "too_late": Policy("cancelled"),
    # These cost their workers.
    "kills": Policy("dead"),
    "kills_in_a_thread": Policy("dead"),
    "crashes": Policy("dead"),
    "deadlocks": Policy("dead", TIMEOUT),
    "deadlocks_in_a_thread": Policy("dead", TIMEOUT),
}


async def enqueue(url: str, numbers: dict[str, int], chance: random.Random) -> set[str]:
    """Enqueue so many of each, in any order; return their ids."""
    made: list[Callable[[], Any]] = []
    async with App(url) as app:
        for name, number in numbers.items():
            task = getattr(failing_app, name)
            retry = task.definition.retry.max_attempts
            for n in range(number):
                payload: dict[str, Any] = {}
                options: dict[str, Any] = {"max_attempts": retry}
                if name.startswith("good"):
                    payload = {"n": n}
                elif name == "wants_a_number":
                    payload = {"n": "none"}
                elif name == "snoozes":
                    payload = {"until": time.time() + 3}
                elif name == "too_late":
                    options["expires"] = 0.001
                made.append(partial(app.enqueue, name, payload, **options))
        chance.shuffle(made)
        ids: set[str] = set()
        for first in range(0, len(made), 500):
            handles = await asyncio.gather(*(call() for call in made[first : first + 500]))
            ids |= {handle.id for handle in handles}
    return ids


async def drained(url: str, fleet: Fleet, chance: random.Random, kills: int) -> float:
    """Let a fleet do everything. Whenever all work, one is killed; each is replaced as a supervisor would."""
    connection = await asyncpg.connect(url)
    began = time.monotonic()
    while await connection.fetchval(LEFT):
        assert time.monotonic() - began < DEADLINE, fleet.log.read_text()[-5000:]
        await asyncio.sleep(0.2)  # the pace of the looks, not a wait for anything
        for place, process in enumerate(fleet.processes):
            if process.poll() is not None:
                fleet.kill(place)
        if kills and await connection.fetchval(REGISTERED, fleet.pids()) == WORKERS:
            await asyncio.sleep(chance.random())
            fleet.kill(chance.randrange(WORKERS))
            kills -= 1
    took = time.monotonic() - began
    while await connection.fetchval(REGISTERED, fleet.pids()) < WORKERS:
        await asyncio.sleep(0.05)
    await asyncio.to_thread(fleet.terminate)
    await connection.close()
    return took


async def check(url: str, ids: set[str]) -> list[asyncpg.Record]:
    """Hold each task against its policy; return all."""
    connection = await asyncpg.connect(url)
    rows: list[asyncpg.Record] = await connection.fetch(ENDED)
    assert {row["id"] for row in rows} == ids
    assert len(rows) == len(ids)
    broken = Counter(
        f"{row['type']}: {said}" for row in rows if (said := POLICIES[row["type"]].broken_by(row))
    )
    assert not broken, broken.most_common(10)
    for place in ("ready", "scheduled", "claim", "claim_task", "running", "attempt", "expiry"):
        assert await connection.fetchval(f"SELECT count(*) FROM windlass.{place}") == 0, place
    await connection.close()
    return rows


@pytest.mark.stress
@pytest.mark.timeout(600)
async def test_every_task_ends_as_its_policy_says_while_workers_are_killed(
    database_url: str, tmp_path: Path
) -> None:
    seed = random.randrange(2**32)
    print(f"\nseed {seed}")
    chance = random.Random(seed)
    numbers = {
        "good": 4000, "good_thread": 2600, "good_process": 100, "recovers": 600, "asks_for_time": 300,
        "snoozes": 200, "unreachable": 500, "odd": 300, "sleeps": 300, "sleeps_in_a_thread": 100,
        "blocks": 6, "hangs_in_a_process": 6, "crashes_its_process": 6, "exits": 6, "wrong_program": 400,
        "refuses": 300, "wants_a_number": 100, "returns_nonsense": 100, "too_late": 76,
    }  # fmt: skip
    assert sum(numbers.values()) == 10_000
    ids = await enqueue(database_url, numbers, chance)
    fleet = Fleet(database_url, tmp_path, APPLICATION, WORKERS)
    try:
        took = await drained(database_url, fleet, chance, kills=20)
    finally:
        fleet.end()

    rows = await check(database_url, ids)
    ends = Counter(row["status"] for row in rows)
    lost = sum((row["errors"] or "").count(LOST) for row in rows)
    print(
        f"{dict(ends)} in {took:.0f} s, {len(fleet.deaths)} kills, {lost} attempts lost with them"
    )


@pytest.mark.stress
@pytest.mark.timeout(600)
async def test_poison_ends_dead_and_costs_others_nothing(database_url: str, tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print(f"\nseed {seed}")
    chance = random.Random(seed)
    good = {"good": 3000, "good_thread": 1900, "good_process": 100}
    poison = {
        "kills": 1, "kills_in_a_thread": 1, "crashes": 1, "deadlocks": 1, "deadlocks_in_a_thread": 1,
        "crashes_its_process": 1, "hangs_in_a_process": 1, "blocks": 1, "wants_a_number": 1,
        "returns_nonsense": 1,
    }  # fmt: skip
    ids = await enqueue(database_url, good | poison, chance)
    fleet = Fleet(database_url, tmp_path, APPLICATION, WORKERS)
    try:
        took = await drained(database_url, fleet, chance, kills=0)
    finally:
        fleet.end()

    rows = await check(database_url, ids)
    ended = {
        name: Counter((row["status"], row["attempts"]) for row in rows if row["type"] == name)
        for name in good | poison
    }
    assert {name: ended[name] for name in good} == {
        name: {("completed", 1): number} for name, number in good.items()
    }
    assert all(status in ("dead", "failed") for name in poison for status, _ in ended[name])
    workers_lost = len(fleet.deaths) + fleet.log.read_text().count("worker.stuck")
    print(f"{len(ids)} tasks in {took:.0f} s; the poison cost {workers_lost} workers")
    assert workers_lost >= 5
