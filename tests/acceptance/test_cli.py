"""The command line as a user types it; workers, and what is about processes, in their own."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import asyncpg
import pytest
from click.testing import CliRunner, Result

from windlass.cli import main
from windlass.cli.caller import caller

APP = """
import asyncio
from windlass import App

app = App()

@app.task(queue="mail", priority="high", retry=3)
async def send(to: str) -> str:
    return f"sent to {to}"

@app.task(retry=1)
async def broken() -> None:
    raise ValueError("it is broken")

@app.task
async def stubborn() -> None:
    print("started", flush=True)
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass

@app.task
async def slow() -> str:
    print("started", flush=True)
    await asyncio.sleep(60)
    return "done"
"""

Run = Callable[..., Result]


@pytest.fixture
def environment(tmp_path: Path, database_url: str) -> dict[str, str]:
    (tmp_path / "shopping.py").write_text(APP)
    return {
        **os.environ,
        "WINDLASS_DATABASE_URL": database_url,
        "WINDLASS_APP": "shopping:app",
        "WINDLASS_LEASE": "2",
        "WINDLASS_HEARTBEAT": "0.5",
        "WINDLASS_SWEEP": "0.2",
        "WINDLASS_LEADER_TERM": "1",
    }


@pytest.fixture
def windlass(tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command in this process: to start one takes longer than most of them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def run(*arguments: str, code: int = 0) -> Result:
        done = CliRunner().invoke(main, arguments, env=environment)
        sys.modules.pop("shopping", None)  # a new process would not have it
        assert done.exit_code == code, done.output
        assert done.exception is None or isinstance(done.exception, SystemExit)
        return done

    return run


def start_worker(
    tmp_path: Path, environment: dict[str, str], *arguments: str
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "windlass.cli", "worker", "shopping:app", *arguments],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_until(said: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not said():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def status(windlass: Run, task_id: str) -> str:
    return str(json.loads(windlass("tasks", "show", task_id, "--json").stdout)[0]["status"])


def test_a_task_enqueued_by_hand_is_done_by_a_worker_that_then_drains(
    tmp_path: Path, environment: dict[str, str], windlass: Run
) -> None:
    task_id = windlass("enqueue", "shopping:app", "send", '{"to": "a"}').stdout.strip()
    worker = start_worker(tmp_path, environment)
    try:
        wait_until(lambda: status(windlass, task_id) == "completed")
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(20) == 0
    finally:
        worker.kill()
        worker.communicate()

    record = json.loads(windlass("tasks", "show", task_id, "--json").stdout)[0]
    assert record["result"] == "sent to a"
    assert (record["queue"], record["priority"], record["max_attempts"]) == ("mail", 20, 3)
    assert json.loads(windlass("workers", "list", "--json").stdout) == []


def test_a_killed_worker_s_running_task_is_taken_over_with_an_attempt_used(
    tmp_path: Path, environment: dict[str, str], windlass: Run
) -> None:
    task_id = windlass("enqueue", "shopping:app", "slow").stdout.strip()
    first = start_worker(tmp_path, environment)
    second = None
    try:
        wait_until(lambda: status(windlass, task_id) == "running")
        first.kill()
        second = start_worker(tmp_path, environment)
        assert second.stdout is not None
        assert second.stdout.readline() == "started\n"
    finally:
        for worker in (first, second):
            if worker is not None:
                worker.kill()
                worker.communicate()

    record = json.loads(windlass("tasks", "show", task_id, "--json").stdout)[0]
    assert (record["attempts"], record["generation"]) == (1, 2)
    assert [error["type"] for error in record["errors"]] == ["WorkerLost"]


def test_a_second_signal_insists_and_the_task_goes_back(
    tmp_path: Path, environment: dict[str, str], windlass: Run
) -> None:
    task_id = windlass("enqueue", "shopping:app", "slow").stdout.strip()
    worker = start_worker(tmp_path, environment)
    try:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "started\n"
        worker.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            worker.wait(0.5)
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(20) == 0
    finally:
        worker.kill()
        worker.communicate()

    record = json.loads(windlass("tasks", "show", task_id, "--json").stdout)[0]
    assert (record["status"], record["attempts"]) == ("pending", 0)


def test_a_handler_that_ignores_its_cancellation_does_not_keep_the_worker(
    tmp_path: Path, environment: dict[str, str], windlass: Run
) -> None:
    task_id = windlass("enqueue", "shopping:app", "stubborn").stdout.strip()
    worker = start_worker(tmp_path, environment, "--shutdown-timeout", "0.5")
    try:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "started\n"
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(20) == 0
    finally:
        worker.kill()
        worker.communicate()

    assert status(windlass, task_id) == "pending"


def test_what_ignores_its_cancellation_does_not_change_the_exit_code() -> None:
    script = """
import asyncio, sys
from windlass.cli.running import run

async def stubborn():
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass

async def main():
    asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    return 3

sys.exit(run(main()))
"""
    done = subprocess.run([sys.executable, "-c", script], check=False, timeout=30)

    assert done.returncode == 3


@pytest.mark.needs_direct("there is no listener without one")
def test_a_worker_outlives_its_listener_and_still_drains_cleanly(
    tmp_path: Path, environment: dict[str, str], windlass: Run, sql_url: str
) -> None:
    worker = start_worker(tmp_path, environment)
    try:
        wait_until(lambda: "elected" in _read_line(worker))
        asyncio.run(_cut_listeners(sql_url))
        task_id = windlass("enqueue", "shopping:app", "send", '{"to": "b"}').stdout.strip()
        wait_until(lambda: status(windlass, task_id) == "completed")
        wait_until(lambda: "listener.repaired" in _read_line(worker))
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(20) == 0
    finally:
        worker.kill()
        worker.communicate()


def _read_line(worker: subprocess.Popen[str]) -> str:
    assert worker.stderr is not None
    return worker.stderr.readline()


async def _cut_listeners(url: str) -> None:
    connection = await asyncpg.connect(url)
    cut: list[asyncpg.Record] = []
    deadline = time.monotonic() + 30
    while not cut and time.monotonic() < deadline:  # it begins to listen beside everything else
        cut = await connection.fetch(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() "
            "AND (query LIKE 'LISTEN%wake%' OR query LIKE '-- probe%')"
        )
        await asyncio.sleep(0.02)
    await connection.close()
    assert len(cut) == 1


def test_bulk_verbs_act_on_ids_or_on_a_filter_and_can_be_tried_dry(windlass: Run) -> None:
    ids = [
        windlass("enqueue", "shopping:app", "send", '{"to": "x"}', "--tag", "old").stdout.strip()
        for _ in range(2)
    ]

    dry = windlass("tasks", "cancel", "--tag", "old", "--dry-run").stdout
    still = json.loads(windlass("tasks", "list", "--status", "pending", "--json").stdout)
    windlass("tasks", "change", ids[0], "--priority", "critical", "--delay", "60")
    windlass("tasks", "cancel", "--tag", "old", "--reason", "tidy")
    cancelled = json.loads(windlass("tasks", "list", "--status", "cancelled", "--json").stdout)
    windlass("tasks", "retry", *ids)
    reopened = json.loads(windlass("tasks", "list", "--status", "pending", "--json").stdout)

    assert all(task_id in dry for task_id in ids)
    assert {task["id"] for task in still} == set(ids)
    (by,) = {task["cancelled_by"] for task in cancelled}
    assert by == caller()
    assert {task["last_error"] for task in cancelled} == {f"tidy (asked for by {by})"}
    assert {task["id"] for task in reopened} == set(ids)


def test_queues_are_listed_paused_and_resumed(windlass: Run) -> None:
    windlass("enqueue", "shopping:app", "send", '{"to": "x"}')
    windlass("queues", "pause", "mail")
    paused = json.loads(windlass("queues", "list", "--json").stdout)
    windlass("queues", "resume", "mail")
    resumed = json.loads(windlass("queues", "list", "--json").stdout)

    assert (paused[0]["name"], paused[0]["paused"]) == ("mail", True)
    assert (resumed[0]["paused"], resumed[0]["counts"]) == (False, {"pending": 1})


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["enqueue", "shopping:app", "send", "{nonsense"], 2, "not JSON"),
        (["enqueue", "shopping:app", "send", '{"too": "a"}'], 1, "send"),
        (["enqueue", "shopping:app", "send", '{"to": "a"}', "--priority", "urgent"], 2, "urgent"),
        (["enqueue", "shopping:app", "send", '{"to": "a"}', "--at", "2030-01-01"], 2, "offset"),
        (["tasks", "list", "--since", "9999-12-31T23:59:59-05:00"], 2, "--since"),
        (["worker", "nowhere:app"], 2, "nowhere"),
        (["worker", "shopping"], 2, "package.module:name"),
        (["worker", "shopping:send"], 2, "not a windlass App"),
        (["worker", "shopping:app", "--queue", "mail:x"], 2, "the weight 'x'"),
        (["worker", "shopping:app", "--queue-concurrency", "mail"], 2, "NAME=N"),
        (
            ["worker", "shopping:app", "--queue", "bulk", "--queue-concurrency", "mail=5"],
            2,
            "is not among",
        ),
        (["worker", "shopping:app", "--concurrency", "0"], 2, "concurrency"),
        (["tasks", "show", "nonsense"], 1, "nonsense"),
        (["tasks", "show", "01890000-0000-7000-8000-000000000000"], 1, "not known"),
        (["tasks", "cancel"], 2, "by id or by filter"),
        (["tasks", "change", "01890000-0000-7000-8000-000000000000"], 2, "nothing to change"),
        (["workers", "drain", "x"], 1, "'x' is not the id of a worker"),
        (["workers", "drain"], 2, "WORKER_ID, --all or --host"),
        (["workers", "drain", "x", "--all"], 2, "only one of these"),
        (["workers", "pause", "01890000-0000-7000-8000-000000000000"], 1, "is not registered"),
        (["workflows", "list"], 2, "not built yet"),
        (["tasks", "explain", "nonsense"], 1, "nonsense"),
        (["tasks", "explain", "01890000-0000-7000-8000-000000000000"], 1, "not known"),
        (["tasks", "history", "x"], 2, "not built yet"),
        (["bogus"], 2, "bogus"),
    ],
)
def test_wrong_usage_is_named_with_its_exit_code(
    windlass: Run, arguments: list[str], code: int, said: str
) -> None:
    done = windlass(*arguments, code=code)

    assert said in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["worker", "nowhere:app"], 2, "nowhere"),
        (["tasks", "show", "nonsense"], 1, "nonsense"),
    ],
)
def test_a_process_ends_with_the_exit_code_and_without_a_traceback(
    tmp_path: Path, environment: dict[str, str], arguments: list[str], code: int, said: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "windlass.cli", *arguments],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_an_unknown_setting_in_the_environment_stops_every_command(
    windlass: Run, environment: dict[str, str]
) -> None:
    environment["WINDLASS_LEESE"] = "5"

    assert "WINDLASS_LEESE" in windlass("queues", "list", code=2).stderr


def test_migrations_are_checked_printed_and_applied(
    windlass: Run, environment: dict[str, str], empty_database_url: str
) -> None:
    environment["WINDLASS_DATABASE_URL"] = empty_database_url

    pending = windlass("migrate", "--check", code=1).stdout
    script = windlass("migrate", "--sql").stdout
    applied = windlass("migrate").stdout

    assert "pending: 0001_tables" in pending
    assert "CREATE TABLE windlass.task" in script
    assert "applied: 0001_tables" in applied
    up_to_date = f"schema 'windlass' is up to date: {applied.split()[-1]}\n"
    assert windlass("migrate", "--check").stdout == up_to_date
    assert windlass("migrate").stdout == up_to_date


def test_a_wrong_password_never_shows(windlass: Run, environment: dict[str, str]) -> None:
    environment["WINDLASS_DATABASE_URL"] = "postgresql://user:hunter2@127.0.0.1:1/none"

    done = windlass("queues", "list", code=1)

    assert "hunter2" not in done.stderr
    assert "the database at 127.0.0.1:1 cannot be reached" in done.stderr


def test_the_package_can_be_run_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "windlass", "--version"],
        check=True,
        capture_output=True,
        text=True,
        timeout=30,
    )

    assert done.stdout.startswith("windlass, version ")
