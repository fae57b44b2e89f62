"""Worker processes of a test: started, stopped in their tracks, killed, waited for."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
DEADLINE = 60.0  # seconds until a test gives up on another process


def until(said: Callable[[], object], seconds: float = DEADLINE) -> None:
    """Return once it is so."""
    deadline = time.monotonic() + seconds
    while not said():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


class WorkerProcess:
    """`windlass worker module:app` in a process of its own, and its log."""

    def __init__(
        self,
        application: str,
        *,
        url: str,
        log: Path,
        folder: Path,
        settings: dict[str, Any],
        failpoints: str = "",
        arguments: tuple[str, ...] = (),
    ) -> None:
        self.log = log
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                [str(folder), str(TESTS), os.environ.get("PYTHONPATH", "")]
            ),
            "WINDLASS_DATABASE_URL": url,
            **{f"WINDLASS_{name.upper()}": str(value) for name, value in settings.items()},
            "FAILPOINTS": failpoints,
            "FAILPOINT_FOLDER": str(folder),
        }
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "windlass.cli", "worker", application, *arguments],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )
        self.pid = self._process.pid

    def said(self) -> str:
        """What it has logged."""
        return self.log.read_text()

    def has_said(self, text: str) -> bool:
        """Whether its log holds this; fails if it has ended without."""
        if text in self.said():
            return True
        assert self._process.poll() is None, f"it has ended: {self.said()}"
        return False

    def is_stopped(self) -> bool:
        """Whether it stands still in its tracks."""
        state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state == "T"

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    def wait(self) -> int:
        """Wait for its end and return its exit code."""
        return self._process.wait(DEADLINE)

    def stop(self) -> int:
        """Ask it to drain, wait for its end and return its exit code."""
        until(self._listens_to_signals)
        self.send(signal.SIGTERM)
        return self.wait()

    def _listens_to_signals(self) -> bool:
        said = self.said()
        has_ended = self._process.poll() is not None
        return has_ended or "worker.started" in said or "doing=" in said  # open, or start

    def end(self) -> None:
        """Leave nothing behind, whatever became of it."""
        self._process.kill()
        self._process.wait()
