"""A worker stopped until its claim was rescued, and continued: nothing that it does changes anything."""

import asyncio
import re
import signal
from pathlib import Path

import pytest

from faults.conftest import Start
from faults.looking import LEFT, run
from faults.processes import WorkerProcess, until
from slowly import slowly
from windlass import App

# Where it stops, and what it says once it goes on.
PLACES = {
    "claim.after": "lease.lost",  # nothing had begun, and nothing may
    "handler.before": "lease.lost",
    "start.before": "lease.lost",
    "enqueue.before": "lease.lost",
    "handler.after": "lease.lost",
    "settle.before": "settlement.lost",
}
AT_THE_END = ("handler.after", "settle.before")


async def enqueue(url: str, name: str) -> None:
    async with App(url) as app:
        await app.enqueue(name, {"n": 1}, max_attempts=10)


def come_back(zombie: WorkerProcess, url: str, start: Start) -> None:
    """Let another worker rescue and finish its task, then let it go on."""
    until(zombie.is_stopped)
    heir = start()
    until(lambda: heir.has_said("worker.started"))
    until(lambda: run(url, LEFT)[0][0] == 0)
    assert heir.stop() == 0
    zombie.send(signal.SIGCONT)


def contents(url: str) -> list[tuple[object, ...]]:
    rows = run(
        url,
        "SELECT id, status::text, attempts, result, completed_at, updated_at "
        "FROM windlass.tasks ORDER BY id",
    )
    return [tuple(row) for row in rows]


@pytest.mark.parametrize("place", slowly(PLACES, lambda place: place not in AT_THE_END))
def test_a_worker_that_comes_back_too_late_changes_nothing_and_says_so(
    database_url: str, sql_url: str, tmp_path: Path, start: Start, place: str
) -> None:
    asyncio.run(enqueue(database_url, "long"))
    zombie = start(f"{place}=stop")
    come_back(zombie, sql_url, start)
    before = contents(sql_url)
    until(lambda: zombie.has_said(PLACES[place]))

    assert zombie.stop() == 0
    assert contents(sql_url) == before
    assert run(sql_url, LEFT)[0][0] == 0
    (counted,) = re.findall(r"leases_lost=(\d+) settlements_lost=(\d+)", zombie.said())
    assert sum(map(int, counted)) >= 1
    # Only what was enqueued under a lease that held is there.
    assert len(before) == (3 if place in {"handler.after", "settle.before"} else 2)
    runs = [line for line in (tmp_path / "ledger").read_text().split("\n") if "long" in line]
    assert len(runs) == (1 if place == "claim.after" else 2)


def test_a_thread_that_goes_on_after_its_lease_was_lost_changes_nothing(
    database_url: str, sql_url: str, tmp_path: Path, start: Start
) -> None:
    asyncio.run(enqueue(database_url, "threaded"))
    zombie = start()
    until((tmp_path / "threaded.waits").exists)
    zombie.send(signal.SIGSTOP)
    (tmp_path / "threaded.go").touch()
    come_back(zombie, sql_url, start)
    before = contents(sql_url)
    until(lambda: "refused 1" in (tmp_path / "ledger").read_text())

    assert zombie.stop() == 0
    assert contents(sql_url) == before
    assert len(before) == 2  # the task, and the child of its second run
    assert "lease.lost" in zombie.said()


def test_a_worker_that_only_waits_keeps_its_lease_and_writes_what_it_did(
    database_url: str, sql_url: str, tmp_path: Path, start: Start
) -> None:
    """Not stopped but paused before its settlement: its heart beats on, so nobody takes its task."""
    asyncio.run(enqueue(database_url, "short"))
    paused = start("settle.before=pause")
    until((tmp_path / "settle.before").exists)
    (granted,) = run(sql_url, "SELECT expires_at FROM windlass.claim")
    beside = start()
    over = "SELECT FROM windlass.claim WHERE clock_timestamp() > $1"
    until(lambda: bool(run(sql_url, over, granted[0])))
    (tmp_path / "settle.before.go").touch()
    until(lambda: run(sql_url, LEFT)[0][0] == 0)

    assert [worker.stop() for worker in (paused, beside)] == [0, 0]
    (row,) = run(sql_url, "SELECT status::text, attempts, generation FROM windlass.tasks")
    assert tuple(row) == ("completed", 1, 1)
    assert len((tmp_path / "ledger").read_text().splitlines()) == 1
