"""An application for workers in processes of their own, some of whose tasks run in processes in turn."""

import os
import subprocess
import sys
import time
from pathlib import Path

from windlass import App, LeaseLost, TaskSet

app = App(processes=2)
library = TaskSet()


@app.task
async def child(n: int) -> int:
    return n


@app.task
async def quick() -> str:
    return "quick"


@app.task(run="process")
async def split(numbers: list[int]) -> list[str]:
    handles = await app.enqueue_many([child.call(n) for n in numbers])
    return [handle.id for handle in handles]


@library.task(run="process")
def split_by_library(numbers: list[int]) -> list[str]:
    return [child.enqueue_sync(n).id for n in numbers]


@app.task(run="process")
def outlive(folder: str) -> None:
    """Go on until the lease is lost, and then enqueue; run again, do nothing."""
    begun, lost, refused = [Path(folder) / name for name in ("begun", "lost", "refused")]
    if begun.exists():
        return
    begun.touch()
    while not lost.exists():
        time.sleep(0.01)
    try:
        child.enqueue_sync(1)
    except LeaseLost:
        refused.touch()


@app.task(run="process")
def endless(folder: str, *, keeps_lock: bool = False) -> None:
    """Write down the process and what it starts, and never end, perhaps keeping the interpreter's lock."""
    program = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    noted = Path(folder) / f"{os.getpid()}.tmp"
    noted.write_text(f"{os.getpid()} {program.pid}")
    noted.rename(noted.with_suffix(".pids"))
    if keeps_lock:
        sum(range(10**15))
    time.sleep(600)


app.include(library)
