"""The application of workers that die, stop and come back at every place of a task's life."""

import asyncio
import os
import time
from pathlib import Path

from faults.failpoints import arm_from_environment
from windlass import App, Context, LeaseLost, TaskState

app = App()
folder = Path(os.environ["FAILPOINT_FOLDER"])


def note(line: str) -> None:
    """Append to what handlers did, in one write, so that a kill leaves no half of a line."""
    descriptor = os.open(folder / "ledger", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, f"{line}\n".encode())
    os.close(descriptor)


@app.task(retry=10)
async def short(n: int) -> int:
    note(f"short {n} {os.getpid()}")
    await asyncio.sleep(0.01)
    return n


@app.task(retry=10)
async def long(ctx: Context, n: int) -> str:
    """Runs until it is known to run, and enqueues a task of its own."""
    note(f"long {n} {os.getpid()}")
    while (await app.handle(ctx.task_id).get()).status is not TaskState.RUNNING:
        await asyncio.sleep(0.05)
    try:
        await child.enqueue(n)
    except LeaseLost:
        note(f"refused {n} {os.getpid()}")
        raise
    return f"{n} by {os.getpid()}"


@app.task(retry=10)
async def across(n: int) -> int:
    """Waits until the test lets it go, whatever happens to the server meanwhile."""
    note(f"across {n} {os.getpid()}")
    while not (folder / "across.go").exists():
        await asyncio.sleep(0.02)
    return n


@app.task(retry=10)
def threaded(n: int) -> int:
    """A plain function, which nobody can interrupt, waits, and then enqueues a task of its own."""
    note(f"threaded {n} {os.getpid()}")
    (folder / "threaded.waits").touch()
    while not (folder / "threaded.go").exists():
        time.sleep(0.02)
    try:
        child.enqueue_sync(n)
    except LeaseLost:
        note(f"refused {n} {os.getpid()}")
        raise
    return n


@app.task(retry=10)
async def child(n: int) -> int:
    note(f"child {n} {os.getpid()}")
    return n


arm_from_environment()
