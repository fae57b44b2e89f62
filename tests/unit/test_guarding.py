"""What handlers have started ends with their worker, however that ends, and not before."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
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


@pytest.mark.parametrize("say", [Guarding.begin, Guarding.end])
def test_a_worker_goes_on_when_its_guardian_was_killed(
    say: Callable[[Guarding, int], None],
) -> None:
    guarding = Guarding()
    guarding.start()
    assert guarding._program is not None
    guarding._program.kill()
    guarding._program.wait()

    say(guarding, 12345)
    guarding.stop()


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
