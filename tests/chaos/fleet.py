"""Worker processes that are killed, stopped and replaced."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

TESTS = Path(__file__).parent.parent


@dataclass(frozen=True, slots=True)
class Hit:
    """A process that was killed, or stopped in its tracks, and when."""

    pid: int
    at: float


@dataclass(slots=True)
class Fleet:
    """So many workers of one application."""

    url: str
    folder: Path
    application: str
    size: int
    deaths: list[Hit] = field(default_factory=list)
    stops: list[Hit] = field(default_factory=list)
    log: Path = field(init=False)
    processes: list[subprocess.Popen[bytes]] = field(init=False)
    stopped: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.log = self.folder / "workers.log"
        self.processes = [self._start() for _ in range(self.size)]

    def _start(self) -> subprocess.Popen[bytes]:
        path = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            **os.environ,
            "WINDLASS_DATABASE_URL": self.url,
            "CHAOS_RUNS": str(self.folder / "runs.jsonl"),
            "PYTHONPATH": os.pathsep.join(path),
        }
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "windlass.cli", "worker", self.application],
                env=environment,
                stdout=log,
                stderr=log,
            )

    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def kill(self, place: int) -> None:
        """End one at once, and start another in its place."""
        process = self.processes[place]
        self.deaths.append(Hit(process.pid, time.time()))
        process.kill()
        process.wait()
        self.stopped.discard(process.pid)
        self.processes[place] = self._start()

    def stop(self, pid: int) -> int:
        """Stop one of ours in its tracks; return its process."""
        assert pid in self.pids()
        os.kill(pid, signal.SIGSTOP)
        self.stopped.add(pid)
        self.stops.append(Hit(pid, time.time()))
        return pid

    def resume(self, pid: int) -> None:
        """Let one go on, unless it was killed meanwhile."""
        if pid in self.stopped:
            self.stopped.discard(pid)
            os.kill(pid, signal.SIGCONT)

    def ended_by_themselves(self) -> list[str]:
        return [
            f"worker {process.pid} ended by itself with code {process.returncode}"
            for process in self.processes
            if process.poll() is not None
        ]

    def terminate(self) -> list[int]:
        """Ask all to drain; return how they ended."""
        for process in self.processes:
            process.send_signal(signal.SIGTERM)
        return [process.wait(60) for process in self.processes]

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
