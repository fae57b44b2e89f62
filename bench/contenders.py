"""Who is measured: Windlass, and the peers that are installed."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PEERS = Path(__file__).parent / "peers"
PYTHON_PEERS = ("pgqueuer", "procrastinate")
NODE_PEERS = ("graphile-worker", "pg-boss")
OURS = "windlass"
YARDSTICK = "faithful loop"


@dataclass(frozen=True)
class Contender:
    """A queue, and how it is asked."""

    name: str
    version: str
    command: tuple[str, ...]
    unfinished: str  # SQL: whether a task is left that has not ended
    part: float = 1.0  # of the tasks that the others get, for one that takes long
    is_python: bool = True

    @property
    def joins_transactions(self) -> bool:
        """Whether its adapter can enqueue in a transaction of the caller."""
        return self.name in JOINING


@dataclass(frozen=True)
class Absent:
    """A peer that is left out, and why."""

    name: str
    reason: str


# What says that all tasks have ended, and how much each is given to do.
UNFINISHED = {
    OURS: "SELECT EXISTS (SELECT FROM windlass.task)",
    YARDSTICK: "SELECT EXISTS (SELECT FROM faithful.task)",
    "graphile-worker": "SELECT EXISTS (SELECT FROM graphile_worker._private_jobs)",
    "pg-boss": "SELECT EXISTS (SELECT FROM pgboss.job WHERE name = 'notes' AND state < 'completed')",
    "pgqueuer": "SELECT EXISTS (SELECT FROM pgqueuer)",
    "procrastinate": (
        "SELECT EXISTS (SELECT FROM procrastinate_jobs WHERE status IN ('todo', 'doing'))"
    ),
}
PARTS = {"pgqueuer": 0.5, "procrastinate": 0.04}
JOINING = (OURS, "graphile-worker", "pgqueuer")


def ours() -> Contender:
    """Windlass as it is in this interpreter."""
    return _python(sys.executable, OURS, "bench.peers.windlass_adapter", _here("windlass"))


def yardstick() -> Contender:
    """The bare loop that keeps our promises and has no features."""
    return _python(sys.executable, YARDSTICK, "bench.faithful", "")


def find_peers(python: str | None, node: Path | None, folder: Path) -> Iterator[Contender | Absent]:
    """Look for the peers: in an interpreter, and in a folder with `node_modules`."""
    yield from _find_node_peers(node, folder)
    for name in PYTHON_PEERS:
        version = _installed(python or sys.executable, name)
        if version is None:
            yield Absent(name, f"{python or 'this interpreter'} does not have it; set BENCH_PYTHON")
        else:
            yield _python(python or sys.executable, name, f"bench.peers.{name}_adapter", version)


def _python(python: str, name: str, module: str, version: str) -> Contender:
    return Contender(name, version, (python, "-m", module), UNFINISHED[name], PARTS.get(name, 1.0))


def _here(name: str) -> str:
    return _installed(sys.executable, name) or "?"


def _installed(python: str, name: str) -> str | None:
    code = f"import {name}; from importlib.metadata import version; print(version('{name}'))"
    try:
        asked = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return asked.stdout.strip() if asked.returncode == 0 else None


def _find_node_peers(node: Path | None, folder: Path) -> Iterator[Contender | Absent]:
    program = _node_program(node)
    for name in NODE_PEERS:
        package = None if node is None else node / "node_modules" / name / "package.json"
        if node is None or program is None or package is None or not package.exists():
            where = "BENCH_NODE is not set" if node is None else f"'{node}' does not have it"
            yield Absent(name, "there is no Node" if node and not program else where)
            continue
        adapter = _beside_modules(node, folder) / f"{name.replace('-', '_')}.mjs"
        version = json.loads(package.read_text())["version"]
        command = (program, str(adapter))
        yield Contender(name, version, command, UNFINISHED[name], is_python=False)


def _node_program(node: Path | None) -> str | None:
    if node is not None:
        # The package `node` of the registry, which a peer may need for its version.
        found = sorted((node / "node_modules").glob("node-*/bin/node"))
        if found:
            return str(found[0])
    return shutil.which("node")


def _beside_modules(node: Path, folder: Path) -> Path:
    """Copy the adapters to where Node finds the modules: it looks beside the file that imports."""
    copies = folder / "adapters"
    if not copies.exists():
        copies.mkdir()
        (copies / "node_modules").symlink_to((node / "node_modules").resolve())
        for script in PEERS.glob("*.mjs"):
            shutil.copy(script, copies)
    return copies
