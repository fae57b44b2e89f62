"""A worker is killed at each named place in the life of a task; the next one carries on."""

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import asyncpg
import pytest

from faults.conftest import Start
from faults.failpoints import STAGES, VERBS
from faults.looking import LEFT, run
from faults.processes import TESTS, WorkerProcess, until
from slowly import slowly
from windlass import App

SHORT, LONG = 5, 2
# A place where nothing had begun costs no attempt; one after the report of a run costs one.
UNSTARTED = ("claim.after", "take.before", "handler.before")
STARTED = ("start.after", "enqueue.before", "enqueue.after")
ENDED = ("handler.after", "settle.before", "settle.after")
PLACES = (*UNSTARTED, *STARTED, *ENDED)
ONE_OF_EACH = ("claim.after", "start.after", "settle.before")
ELSEWHERE = (
    *("claim.before", "take.after", "start.before", "pulse.before", "pulse.after"),
    *("set_idle.before", "set_idle.after", "lead.before", "lead.after"),
    *("rescue.before", "rescue.after", "tidy.after", "register.before", "register.after"),
)
DRAINING = ("drain.before", "drain.after", "leave.before", "resign.before")


async def enqueue(url: str) -> None:
    async with App(url) as app:
        for n in range(SHORT):
            await app.enqueue("short", {"n": n}, max_attempts=10)
        for n in range(LONG):
            await app.enqueue("long", {"n": n}, max_attempts=10)


def finish(heir: WorkerProcess, url: str) -> None:
    """Let a worker do what is left, and stop it."""
    until(lambda: heir.has_said("worker.started"))
    until(lambda: run(url, LEFT)[0][0] == 0)
    assert heir.stop() == 0, heir.said()


def check_everything_completed_once(url: str) -> dict[str, list[asyncpg.Record]]:
    rows = run(url, "SELECT type, status::text, attempts, payload FROM windlass.tasks")
    by_type: dict[str, list[asyncpg.Record]] = {}
    for row in rows:
        by_type.setdefault(row["type"], []).append(row)
    assert {row["status"] for row in rows} == {"completed"}
    assert len(by_type["short"]) == SHORT
    assert len(by_type["long"]) == LONG
    return by_type


@pytest.mark.parametrize("place", slowly(PLACES, lambda place: place not in ONE_OF_EACH))
def test_what_a_killed_worker_held_is_carried_out_by_the_next(
    database_url: str, sql_url: str, tmp_path: Path, start: Start, place: str
) -> None:
    asyncio.run(enqueue(database_url))
    victim = start(f"{place}=kill")
    assert victim.wait() == -signal.SIGKILL, victim.said()
    assert (tmp_path / place).exists()

    finish(start(), sql_url)

    ended = check_everything_completed_once(sql_url)
    runs = Counter(
        line.rpartition(" ")[0] for line in (tmp_path / "ledger").read_text().split("\n")
    )
    # Each run of a parent enqueues its child once: at least once is what was promised.
    assert LONG <= len(ended["child"]) <= sum(runs[f"long {n}"] for n in range(LONG))
    attempts = [row["attempts"] for row in ended["long"]]
    if place in UNSTARTED:
        assert attempts == [1] * LONG
    if place in STARTED:
        assert attempts == [2] * LONG


@pytest.mark.slow
def test_workers_that_are_killed_one_after_another_leave_everything_to_the_last(
    database_url: str, sql_url: str, tmp_path: Path, start: Start
) -> None:
    asyncio.run(enqueue(database_url))
    for place in ELSEWHERE:
        victim = start(f"{place}=kill")
        assert victim.wait() == -signal.SIGKILL, victim.said()
        assert (tmp_path / place).exists()

    finish(start(), sql_url)

    check_everything_completed_once(sql_url)


@pytest.mark.parametrize("place", slowly(DRAINING, lambda place: place != "drain.after"))
def test_a_worker_that_is_killed_while_it_drains_loses_nothing(
    database_url: str, sql_url: str, tmp_path: Path, start: Start, place: str
) -> None:
    asyncio.run(enqueue(database_url))
    victim = start(f"{place}=kill")
    until((tmp_path / "ledger").exists)
    victim.send(signal.SIGTERM)
    assert victim.wait() == -signal.SIGKILL, victim.said()

    finish(start(), sql_url)

    check_everything_completed_once(sql_url)


PRODUCER = "import asyncio\nfrom faults.life_app import short\nasyncio.run(short.enqueue(7))\n"


@pytest.mark.parametrize(("place", "tasks"), [("enqueue.before", 0), ("enqueue.after", 1)])
def test_a_killed_producer_leaves_a_whole_task_or_none(
    database_url: str, sql_url: str, tmp_path: Path, place: str, tasks: int
) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
        "WINDLASS_DATABASE_URL": database_url,
        "FAILPOINTS": f"{place}=kill",
        "FAILPOINT_FOLDER": str(tmp_path),
    }
    producer = subprocess.run([sys.executable, "-c", PRODUCER], env=environment, check=False)

    assert producer.returncode == -signal.SIGKILL
    counts = run(
        sql_url,
        "SELECT (SELECT count(*) FROM windlass.task), (SELECT count(*) FROM windlass.ready)",
    )
    assert tuple(counts[0]) == (tasks, tasks)


def test_every_place_that_is_named_is_one() -> None:
    named = {place.rpartition(".")[0] for place in (*PLACES, *ELSEWHERE, *DRAINING)}

    assert named <= {*VERBS, *STAGES}
