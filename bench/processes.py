"""What processes of this machine have used so far, as Linux counts it."""

import os
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")
END_WITHIN = 10.0  # seconds, of a process that was asked to

_PARENT, _USER, _SYSTEM, _ENDED_USER, _ENDED_SYSTEM = 1, 11, 12, 13, 14  # after the name


def cpu_seconds(root: int) -> float:
    """Of a process and everything below it, those that have ended included."""
    ticks = 0
    for process in family(root):
        fields = _fields(process)
        if fields:
            places = (_USER, _SYSTEM, _ENDED_USER, _ENDED_SYSTEM)
            ticks += sum(int(fields[place]) for place in places)
    return ticks / TICKS


def busy_seconds() -> float:
    """Of all processors of this machine, whoever had them."""
    user, nice, system, _idle, _waiting, *rest = _machine()
    return (user + nice + system + sum(rest)) / TICKS


def peak_megabytes(root: int) -> float:
    """The most memory that a process and those below it have had, summed."""
    return sum(_peak_kilobytes(process) for process in family(root)) / 1024


def parent(process: int) -> int | None:
    """Return the parent of a process, if it can be seen from here."""
    fields = _fields(process)
    return int(fields[_PARENT]) if fields else None


def name(process: int) -> str | None:
    """Return the name of a process, if it can be seen from here."""
    try:
        return Path(f"/proc/{process}/comm").read_text().strip()
    except OSError:
        return None


def family(root: int) -> list[int]:
    """Return a process and everything below it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (above := parent(int(entry.name))) is not None:
            children.setdefault(above, []).append(int(entry.name))
    found = [root]
    for process in found:
        found += children.get(process, [])
    return found


def end(workers: Iterable[subprocess.Popen[bytes]]) -> None:
    """End processes that we started: ask all of them, then insist."""
    asked = list(workers)
    for worker in asked:
        worker.terminate()
    for worker in asked:
        try:
            worker.wait(END_WITHIN)
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()


def _machine() -> list[int]:
    first = Path("/proc/stat").read_text().splitlines()[0]
    return [int(ticks) for ticks in first.split()[1:9]]  # those of guests are counted already


def _fields(process: int) -> Sequence[str]:
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:  # it has ended meanwhile
        return ()
    return text.rpartition(")")[2].split()  # a name may hold anything


def _peak_kilobytes(process: int) -> int:
    try:
        status = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return 0
    peaks = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")]
    return int(peaks[0]) if peaks else 0
