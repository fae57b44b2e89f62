"""What `windlass worker` tells systemd, and that nobody else speaks for a service."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from acceptance.quick import QUICK
from faults.processes import until
from windlass import App
from windlass.cli.systemd import watchdog_interval

WITHIN = 30.0  # seconds
COMMAND = [sys.executable, "-m", "windlass.cli", "worker", "served:app"]


@pytest.fixture
def environment(tmp_path: Path, database_url: str) -> dict[str, str]:
    (tmp_path / "served.py").write_text("from windlass import App\napp = App()\n")
    return {
        **os.environ,
        "WINDLASS_DATABASE_URL": database_url,
        "NOTIFY_SOCKET": str(tmp_path / "notify"),
        "WATCHDOG_USEC": "20000",
    }


@pytest.fixture
def heard(environment: dict[str, str]) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(environment["NOTIFY_SOCKET"])
        listening.settimeout(WITHIN)
        yield listening


def test_systemd_is_told_that_a_worker_is_ready_lives_and_stops(
    tmp_path: Path, environment: dict[str, str], heard: socket.socket
) -> None:
    worker = subprocess.Popen(COMMAND, cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL)
    try:
        told = [heard.recv(100)]
        while told[-3:] != [b"READY=1", b"WATCHDOG=1", b"WATCHDOG=1"]:
            told.append(heard.recv(100))
        worker.send_signal(signal.SIGTERM)
        while told[-1] != b"STOPPING=1":
            told.append(heard.recv(100))
        assert worker.wait(WITHIN) == 0
    finally:
        worker.kill()
        worker.wait()

    assert set(told) == {b"READY=1", b"WATCHDOG=1", b"STOPPING=1"}


def test_a_worker_does_not_wait_for_systemd_to_read(
    tmp_path: Path, environment: dict[str, str], heard: socket.socket
) -> None:
    with (tmp_path / "log").open("w+") as log:
        worker = subprocess.Popen(COMMAND, cwd=tmp_path, env=environment, stderr=log)
        try:
            while heard.recv(100) != b"READY=1":
                pass
            until(lambda: "systemd.deaf state=WATCHDOG=1" in (tmp_path / "log").read_text())
            worker.terminate()
            assert worker.wait(WITHIN) == 0
        finally:
            worker.kill()
            worker.wait()
    assert "loop.blocked" not in (tmp_path / "log").read_text()


def test_systemd_that_does_not_listen_is_told_of_in_the_log(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    with subprocess.Popen(
        COMMAND, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stderr is not None
        said = next(line for line in worker.stderr if "systemd.deaf" in line)
        worker.terminate()
        worker.stderr.read()

    assert "systemd.deaf state=READY=1" in said or "systemd.deaf state=WATCHDOG=1" in said


@pytest.mark.parametrize(("process", "interval"), [("", 0.01), ("own", 0.01), ("1", None)])
def test_signs_of_life_are_for_whom_systemd_has_named(
    monkeypatch: pytest.MonkeyPatch, process: str, interval: float | None
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "20000")
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    if process:
        monkeypatch.setenv("WATCHDOG_PID", process.replace("own", str(os.getpid())))

    assert watchdog_interval() == interval


async def test_a_worker_of_another_program_does_not_speak_for_its_service(
    database_url: str,
    environment: dict[str, str],
    heard: socket.socket,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC"):
        monkeypatch.setenv(name, environment[name])
    async with App(database_url, **QUICK) as app:
        await app.run_worker(until_idle=True)

    heard.setblocking(False)
    with pytest.raises(BlockingIOError):
        heard.recv(100)
