"""How many processes a worker has, and when one is replaced."""

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Wear:
    """After what a process is replaced by a new one; 0: never."""

    tasks: int = 0
    age: float = 0.0  # seconds
    memory: int = 0  # resident bytes after a task


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessOptions:
    """The processes of a worker."""

    size: int = 1
    wear: Wear = Wear()
    application: str = ""  # module:name, if a process can find it there
    url: str = ""  # of its database, which tests may have changed


def usable_cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
