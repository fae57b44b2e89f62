"""What handlers have started ends with their worker, however that ends, and not before."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from acceptance.processes.looking import is_alive, until
from windlass.runtime.processes.guarding import Guarding

# A worker that names two groups, takes one back, and is killed; it may have left a fork of itself.
WORKER = """
import os, signal, subprocess, sys, time
from windlass.runtime.processes.guarding import Guarding

guarding = Guarding()
guarding.start()
started = [subprocess.Popen(["sleep", "600"], start_new_session=True) for _ in range(2)]
for one in started:
    guarding.begin(one.pid)
guarding.end(started[1].pid)
fork = os.fork() if sys.argv[1] == "forked" else 0
if fork == 0 and sys.argv[1] == "forked":
    time.sleep(600)
print(*(one.pid for one in started), guarding._program.pid, fork, file=open(sys.argv[2], "w"), flush=True)
time.sleep(600)
"""

# A worker whose guardian is killed, or cannot be started at first, and that names groups before and meanwhile.
REPLACED = """
import signal, subprocess, sys, time
from windlass.runtime.processes.guarding import Guarding

how, noted, python = *sys.argv[1:], sys.executable
if how == "cannot start":
    sys.executable = "/nowhere/python"
guarding = Guarding()
guarding.start()
first = guarding._program
before, taken_back, after = [subprocess.Popen(["sleep", "600"], start_new_session=True) for _ in range(3)]
guarding.begin(before.pid)
guarding.begin(taken_back.pid)
if how == "ends":
    first.kill()
    first.wait()
guarding.end(taken_back.pid)
guarding.begin(after.pid)
sys.executable = python
while guarding._program in (None, first):
    time.sleep(0.01)
pids = [one.pid for one in (before, taken_back, after, guarding._program)]
print(*pids, file=open(noted, "w"), flush=True)
time.sleep(600)
"""


@pytest.fixture
def started() -> Iterator[list[int]]:
    pids: list[int] = []
    yield pids
    for pid in filter(None, pids):
        if is_alive(pid):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("how", ["alone", "forked"])
async def test_a_killed_worker_takes_the_groups_with_it_that_it_has_named(
    how: str, started: list[int], tmp_path: Path
) -> None:
    noted = tmp_path / "noted"
    worker = await asyncio.to_thread(
        subprocess.Popen, [sys.executable, "-c", WORKER, how, str(noted)]
    )
    await until(lambda: noted.exists() and noted.read_text().endswith("\n"))
    started += map(int, noted.read_text().split())
    named, taken_back, program, fork = started
    assert all(map(is_alive, (named, taken_back, program)))

    worker.kill()
    worker.wait()
    await until(lambda: not is_alive(named) and not is_alive(program))

    assert is_alive(taken_back)
    assert is_alive(fork) == (how == "forked")


def test_it_ends_at_once_when_it_is_told_to_and_ends_nothing() -> None:
    other = subprocess.Popen(["sleep", "600"], start_new_session=True)
    guarding = Guarding()
    guarding.start()
    assert guarding._program is not None
    pid = guarding._program.pid
    guarding.begin(other.pid)

    guarding.stop()

    assert not Path(f"/proc/{pid}").exists()
    assert other.poll() is None
    other.kill()
    other.wait()


@pytest.mark.parametrize("how", ["ends", "cannot start"])
async def test_another_takes_its_place_and_is_told_of_all(
    how: str, started: list[int], tmp_path: Path
) -> None:
    noted = tmp_path / "noted"
    worker = await asyncio.to_thread(
        subprocess.Popen, [sys.executable, "-c", REPLACED, how, str(noted)]
    )
    await until(lambda: noted.exists() and noted.read_text().endswith("\n"))
    started += map(int, noted.read_text().split())
    before, taken_back, after, program = started

    worker.kill()
    worker.wait()
    await until(lambda: not any(map(is_alive, (before, after, program))))

    assert is_alive(taken_back)


async def test_signals_for_the_worker_or_its_terminal_do_not_end_it() -> None:
    guarding = Guarding()
    guarding.start()
    program = guarding._program
    assert program is not None
    assert os.getsid(program.pid) == program.pid
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        await until(partial(is_ignored, program.pid, each))
        program.send_signal(each)

    guarding.stop()

    assert program.returncode == 0


def is_ignored(pid: int, number: signal.Signals) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    (mask,) = re.findall(r"(?m)^SigIgn:\s*(\w+)$", status)
    return bool(int(mask, 16) >> (number - 1) & 1)


def test_a_worker_goes_on_when_there_can_be_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    guarding = Guarding()

    guarding.start()

    assert "process.failed" in caplog.text
    guarding.begin(12345)
    guarding.stop()


def test_a_process_whose_worker_is_gone_already_ends_at_once() -> None:
    code = "from windlass.runtime.processes.child import _stand_apart; _stand_apart(1 << 30)"

    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=60)

    assert done.returncode == 1
