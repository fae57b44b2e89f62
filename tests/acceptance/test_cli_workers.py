"""Worker processes keep the shares of their queues, and are paused, resumed and drained by command."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import asyncpg
import pytest
from click.testing import CliRunner

from windlass import App
from windlass.cli import main

APP = """
import asyncio
from pathlib import Path
from windlass import App

app = App()

@app.task
async def work() -> None:
    await asyncio.sleep(0)

@app.task
async def held() -> None:
    print("started", flush=True)
    while not Path("go").exists():
        await asyncio.sleep(0.05)

@app.task
async def slow() -> str:
    print("started", flush=True)
    await asyncio.sleep(0.5)
    return "done"
"""

Command = Callable[..., str]
Start = Callable[..., subprocess.Popen[str]]

SHARE = """
SELECT queue, count(*)
FROM (
    SELECT queue FROM windlass.tasks WHERE type = 'work' ORDER BY started_at, claimed_at LIMIT $1
) AS first
GROUP BY queue
"""


@pytest.fixture
def environment(tmp_path: Path, database_url: str) -> dict[str, str]:
    (tmp_path / "fleet_app.py").write_text(APP)
    settings = {"LEASE": "6", "HEARTBEAT": "2", "SWEEP": "0.2", "LEADER_TERM": "1.5"}
    return {
        **os.environ,
        "WINDLASS_DATABASE_URL": database_url,
        "WINDLASS_APP": "fleet_app:app",
        **{f"WINDLASS_{name}": value for name, value in settings.items()},
    }


@pytest.fixture
def windlass(
    tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> Command:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def run(*arguments: str) -> str:
        done = CliRunner().invoke(main, arguments, env=environment)
        sys.modules.pop("fleet_app", None)
        assert done.exit_code == 0, done.output
        return done.stdout

    return run


@pytest.fixture
def start(tmp_path: Path, environment: dict[str, str]) -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def worker(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "windlass.cli", "worker", "fleet_app:app", *arguments]
        process = subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield worker
    for process in started:
        process.kill()
        process.communicate()


def workers(windlass: Command) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(windlass("workers", "list", "--json"))
    return found


def wait_until(said: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not said():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


async def work() -> None: ...


async def test_the_shares_of_a_process_are_seen_in_the_records_of_its_tasks(
    database_url: str, sql_url: str, start: Start, environment: dict[str, str]
) -> None:
    # Shares are kept turn by turn, and one that fills a buffer takes all there is of a queue.
    environment["WINDLASS_BUFFER"] = "0"
    async with App(database_url) as app:
        task = app.task(work)
        for queue in ("bulk", "mail"):
            await app.enqueue_many([task.options(queue=queue).call() for _ in range(400)])
    start("--queue", "mail:3", "--queue", "bulk:1", "--concurrency", "20")
    session = await asyncpg.connect(sql_url)
    left = "SELECT count(*) FROM windlass.tasks WHERE status <> 'completed'"
    deadline = time.monotonic() + 30
    while await session.fetchval(left):
        assert time.monotonic() < deadline
    shares = dict(await session.fetch(SHARE, 400))
    await session.close()

    assert 280 <= shares["mail"] <= 320, shares  # a claim of 20 more or less


def test_a_process_that_is_drained_by_command_ends_with_0_and_loses_nothing(
    windlass: Command, start: Start
) -> None:
    task_id = windlass("enqueue", "fleet_app:app", "slow").strip()
    process = start()
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    (record,) = workers(windlass)

    said = windlass("workers", "drain", str(record["id"]))

    assert str(record["id"]) in said
    assert process.wait(20) == 0
    (task,) = json.loads(windlass("tasks", "show", task_id, "--json"))
    assert (task["status"], task["attempts"], task["result"]) == ("completed", 1, "done")
    assert workers(windlass) == []


def test_a_process_that_is_told_to_end_is_seen_as_draining_until_it_has(
    windlass: Command, start: Start, tmp_path: Path
) -> None:
    windlass("enqueue", "fleet_app:app", "held")
    process = start()
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"

    process.send_signal(signal.SIGTERM)
    wait_until(lambda: workers(windlass)[0]["drained_at"] is not None)
    listed = windlass("workers", "list")
    task_id = windlass("enqueue", "fleet_app:app", "held").strip()
    told = json.loads(windlass("tasks", "explain", task_id, "--json"))
    (tmp_path / "go").touch()

    assert "draining" in listed
    assert not told["has_worker"]
    assert told["reasons"][0]["handle_type"][0].endswith(" (draining)")
    assert process.wait(20) == 0
    assert workers(windlass) == []


def test_all_workers_of_a_host_are_drained_and_no_others(windlass: Command, start: Start) -> None:
    processes = [start(), start()]
    wait_until(lambda: len(workers(windlass)) == 2)
    host = str(workers(windlass)[0]["host"])

    assert "no worker" in windlass("workers", "drain", "--host", f"not-{host}")
    assert windlass("workers", "drain", "--host", host).count("drains") == 2

    assert [process.wait(20) for process in processes] == [0, 0]


def test_a_process_is_paused_and_resumed_by_command(windlass: Command, start: Start) -> None:
    start()
    wait_until(lambda: [one["idle"] for one in workers(windlass)] == [True])
    worker_id = str(workers(windlass)[0]["id"])

    windlass("workers", "pause", worker_id)
    wait_until(lambda: workers(windlass)[0]["idle"] is False)  # so it has heard of it
    listed = windlass("workers", "list")
    task_id = windlass("enqueue", "fleet_app:app", "work").strip()
    status = json.loads(windlass("tasks", "show", task_id, "--json"))[0]["status"]
    windlass("workers", "resume", worker_id)

    def is_done() -> bool:
        found = json.loads(windlass("tasks", "show", task_id, "--json"))[0]["status"]
        return bool(found == "completed")

    assert "paused" in listed
    assert status == "pending"
    wait_until(is_done)
    assert workers(windlass)[0]["paused_at"] is None
