"""Where a measurement takes place: databases of its own, adapters asked, workers started."""

import json
import os
import secrets
import shutil
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from bench import processes
from bench.contenders import Contender
from bench.counters import Counters
from bench.servers import Server

ROOT = Path(__file__).parents[1]
ASK_WITHIN = 1800.0  # seconds, for an adapter to answer
LOOK_EVERY = 0.01
_TALLY = struct.Struct("5q")
_NOTHING: Mapping[str, str] = MappingProxyType({})


class Failed(Exception):  # noqa: N818 - as all of ours
    """A contender did not do what it was asked for."""


@dataclass(frozen=True)
class Workload:
    """What the tasks are like; what is not said is the best setting of the contender."""

    tasks: int = 0
    payload_bytes: int = 0
    sleep_ms: float = 0.0
    at_once: int = 0
    lanes: int = 1
    sync: bool = False
    results: bool = False
    keys: bool = False
    gates: str = ""  # what tasks have to pass: "queue" (a limit of lanes), "values" or "ordering"
    delay: float = 0.0  # seconds
    within: bool = False
    loops: int = 0
    processes: int = 0

    def options(self) -> list[str]:
        """As an adapter reads them."""
        given = []
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "tasks" or value == field.default:
                continue
            given += [f"--{field.name.replace('_', '-')}", *([] if value is True else [str(value)])]
        return given

    def tasks_for(self, contender: Contender) -> int:
        """How many: fewer for one that takes long."""
        return max(1, round(self.tasks * contender.part))


NO_OPS = Workload()


class Tally(NamedTuple):
    """What one worker process says of its handlers; times are nanoseconds."""

    process: int
    began: int
    first: int
    cpu_before: int
    ran: int


class Fleet:
    """Worker processes of one contender, and what they have done."""

    def __init__(self, stage: "Stage", contender: Contender, database: str) -> None:
        self._stage = stage
        self._contender = contender
        self._database = database
        self.folder = Path(tempfile.mkdtemp(dir=stage.folder))
        self._log = self.folder / "log"
        self.workers: list[subprocess.Popen[bytes]] = []

    def start(self, workload: Workload, settings: Mapping[str, str] = _NOTHING) -> None:
        """Start one more worker."""
        with self._log.open("ab") as log:
            self.workers.append(
                subprocess.Popen(
                    self._stage.command(
                        self._contender,
                        self._database,
                        ["work"],
                        folder=self.folder,
                        workload=workload,
                    ),
                    stdout=log,
                    stderr=log,
                    env=_environment() | dict(settings),
                )
            )

    def tallies(self) -> list[Tally]:
        """Of those that have begun to work."""
        read = [path.read_bytes() for path in self.folder.glob("*.tally")]
        return [Tally(*_TALLY.unpack(one)) for one in read if len(one) == _TALLY.size]

    def ran(self) -> int:
        """How many handlers have run."""
        return sum(tally.ran for tally in self.tallies())

    def first(self) -> int:
        """When the first handler ran."""
        return min(tally.first for tally in self.tallies() if tally.ran)

    def starts(self) -> list[float]:
        """Milliseconds that tasks waited for their handlers."""
        texts = [path.read_text() for path in self.folder.glob("*.starts")]
        return [int(line) / 1e6 for text in texts for line in text.splitlines()]

    def forget_starts(self) -> None:
        """Drop those that were only to warm up."""
        for path in self.folder.glob("*.starts"):
            os.truncate(path, 0)

    def cpu_seconds(self) -> float:
        """Of all workers, since their first handlers."""
        total = sum(processes.cpu_seconds(worker.pid) for worker in self.workers)
        return total - sum(tally.cpu_before for tally in self.tallies() if tally.ran) / 1e9

    def peak_megabytes(self) -> float:
        """Of the worker that took most."""
        return max(processes.peak_megabytes(worker.pid) for worker in self.workers)

    def wait(self, until: Callable[[], bool], within: float, what: str) -> None:
        """Look again and again, as long as the workers live."""
        deadline = time.monotonic() + within
        while not until():
            if any(worker.poll() is not None for worker in self.workers):
                raise Failed(f"a worker of {self._contender.name} has ended: {self._log_end()}")
            if time.monotonic() > deadline:
                raise Failed(
                    f"{self._contender.name}: {what} not within {within:.0f} s "
                    f"({self.ran()} handlers ran): {self._log_end()}"
                )
            time.sleep(LOOK_EVERY)

    def end(self) -> None:
        """End the workers."""
        processes.end(self.workers)
        shutil.rmtree(self.folder)

    def _log_end(self) -> str:
        return self._log.read_text(errors="replace")[-1500:]


class Stage:
    """One server, and a folder for what is said about a run."""

    def __init__(self, server: Server, folder: Path) -> None:
        self.server = server
        self.folder = folder
        self.counters = Counters(server)
        self._mark = f"bench_{secrets.token_hex(3)}"  # of our databases, beside those of others
        self._made: set[str] = set()
        self._numbers = 0

    @contextmanager
    def database(self, contender: Contender) -> Iterator[str]:
        """Make a database with the tables of a contender, and drop it afterwards."""
        name = self.make(contender)
        try:
            yield name
        finally:
            self._drop(name)

    def make(self, contender: Contender) -> str:
        """Make a database that stays until the end."""
        template = self._template(contender)
        self._numbers += 1
        name = f"{self._mark}_{self._numbers}"
        self._administer(f"CREATE DATABASE {name} TEMPLATE {template}")
        self._made.add(name)
        return name

    def _template(self, contender: Contender) -> str:
        """Make the tables of a contender once; databases are copied from there."""
        name = f"{self._mark}_{contender.name}".replace("-", "_").replace(" ", "_")
        if name not in self._made:
            self._administer(f"CREATE DATABASE {name}")
            self._made.add(name)
            self.ask(contender, name, "setup")
        return name

    def ask(
        self,
        contender: Contender,
        database: str,
        command: str,
        number: float = 0,
        workload: Workload = NO_OPS,
    ) -> dict[str, float]:
        """Have an adapter do something that ends, and return what it says."""
        asked = subprocess.run(
            self.command(
                contender,
                database,
                [command, f"{number:.15g}"],
                folder=self.folder,
                workload=workload,
            ),
            capture_output=True,
            text=True,
            check=False,
            timeout=ASK_WITHIN,
            env=_environment(),
        )
        if asked.returncode != 0:
            raise Failed(f"{contender.name} {command}: {asked.stderr[-1500:]}")
        answer: dict[str, float] = json.loads(asked.stdout.splitlines()[-1])
        return answer

    @contextmanager
    def fleet(self, contender: Contender, database: str) -> Iterator[Fleet]:
        """Start no worker yet, and end those that are started in the block."""
        fleet = Fleet(self, contender, database)
        try:
            yield fleet
        finally:
            fleet.end()

    def settle_down(self, database: str) -> None:
        """Leave nothing to do from before: what follows would pay for it."""
        with self.server.connect(database) as connection:
            connection.execute("VACUUM ANALYZE")
            connection.execute("CHECKPOINT")

    def close(self) -> None:
        """Drop what was made."""
        for name in sorted(self._made):
            self._drop(name)
        self.counters.close()

    def command(
        self,
        contender: Contender,
        database: str,
        asked: Sequence[str],
        *,
        folder: Path,
        workload: Workload,
    ) -> list[str]:
        """The command line of an adapter."""
        where = ["--url", self.server.on(database), "--folder", str(folder)]
        return [*contender.command, *asked, *where, *workload.options()]

    def _administer(self, statement: str) -> None:
        with self.server.connect() as connection:
            connection.execute(statement)

    def _drop(self, name: str) -> None:
        self._administer(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
        self._made.discard(name)


def _environment() -> dict[str, str]:
    return dict(os.environ) | {"PYTHONPATH": str(ROOT)}
