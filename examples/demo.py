"""Run the shop for a day that lasts some seconds: `make demo`, or python examples/demo.py."""

import asyncio
import logging
import os
import secrets
import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PLACE = Path.cwd() / ".windlass"
# Set before the shop makes its app: the demo fills no database that the environment may name.
os.environ["WINDLASS_DATABASE_URL"] = f"embedded:{PLACE}"

import shop  # noqa: E402 - after the line above

from windlass import Handle, TaskRecord, TaskState  # noqa: E402 - as above
from windlass.model.task import ENDS, TaskFilter  # noqa: E402 - as above

REFRESH = 0.5  # seconds
PATIENCE = 90.0  # seconds until the demo gives up
Ends = Counter[tuple[str, TaskState]]


@dataclass(frozen=True)
class Look:
    """The tasks of this run, as they stood at one moment."""

    at: float  # monotonic
    tasks: Sequence[TaskRecord]

    @property
    def ended(self) -> int:
        return sum(task.status in ENDS for task in self.tasks)

    def states(self) -> Counter[TaskState]:
        return Counter(task.status for task in self.tasks)

    def ends(self) -> Ends:
        return Counter((task.type, task.status) for task in self.tasks if task.status in ENDS)

    def waits(self) -> list[float]:
        """Seconds from ready to start of the latest attempt, shortest first."""
        return sorted(
            (task.started_at - task.scheduled_for).total_seconds()
            for task in self.tasks
            if task.started_at is not None
        )


class Screen:
    """Rewrites its lines on a terminal; elsewhere prints one line after the other."""

    def __init__(self) -> None:
        self._is_terminal = sys.stdout.isatty()
        self._lines = 0

    def show(self, lines: list[str]) -> None:
        if not self._is_terminal:
            print(" | ".join(lines), flush=True)
            return
        width = shutil.get_terminal_size().columns - 1  # a wrapped line would be two to go up
        up = f"\x1b[{self._lines}F" if self._lines else ""
        print(up + "\n".join(f"{line[:width]}\x1b[K" for line in lines), flush=True)
        self._lines = len(lines)


async def look(run: str) -> Look:
    store = await shop.app.store()
    page = await store.tasks(TaskFilter(tag=f"run:{run}", limit=10_000))
    return Look(time.monotonic(), page.records)


def summary(now: Look, before: Look, began: float, expected: int) -> list[str]:
    states = now.states()
    shown = "  ".join(f"{state} {states[state]}" for state in TaskState if states[state])
    rate = (now.ended - before.ended) / max(now.at - before.at, 0.001)
    line = f"{now.at - began:5.1f} s  {now.ended} of {expected} ended, {rate:.0f}/s"
    return [line, shown, describe_waits(now.waits())]


def describe_waits(waits: list[float]) -> str:
    if not waits:
        return "wait from ready to start: none has started yet"
    half, most = waits[len(waits) // 2], waits[len(waits) * 95 // 100]
    return (
        f"wait from ready to start: half {half:.2f} s, 95 % {most:.2f} s, longest {waits[-1]:.2f} s"
    )


def table(ends: Ends, expected: Ends) -> list[str]:
    lines = [f"{'task':<16}{'state':<12}{'tasks':>6}{'expected':>10}"]
    for kind, state in sorted(ends.keys() | expected.keys()):
        wanted, found = expected[kind, state], ends[kind, state]
        wrong = "" if wanted == found else "  <- unexpected"
        lines.append(f"{kind:<16}{state:<12}{found:>6}{wanted:>10}{wrong}")
    return lines


async def watch(run: str, expected: int) -> Look:
    """Show how it goes until every task has ended."""
    screen = Screen()
    began = time.monotonic()
    before = now = await look(run)
    while True:
        screen.show(summary(now, before, began, expected))
        if now.ended >= expected or now.at - began > PATIENCE:
            return now
        await asyncio.sleep(REFRESH)
        before, now = now, await look(run)


async def show_one(state: TaskState, tasks: Sequence[TaskRecord]) -> None:
    """Look at one task of a state by its handle, as an application would."""
    found = next((task for task in tasks if task.status is state), None)
    if found is not None:
        task = await shop.app.handle(found.id).get()
        print(f"{task.type} {task.id} is {state}, attempts {task.attempts}: {task.last_error}")


async def open_shop() -> int:
    run = secrets.token_hex(4)
    expected = shop.expected_ends()
    async with shop.app:
        handles: list[Handle] = await shop.app.enqueue_many(shop.opening_day(run))
        known = sum(not handle.created for handle in handles)
        print(f"run {run}: {len(handles)} calls, {known} of them repeated, so enqueued only once")
        async with shop.app.worker(concurrency=20, shutdown_timeout=5):
            last = await watch(run, expected.total())
        report = await handles[0].result(timeout=10)
        print(f"\nfirst report: {report}")
        await show_one(TaskState.FAILED, last.tasks)
        await show_one(TaskState.DEAD, last.tasks)
        print("", *table(last.ends(), expected), sep="\n")
    if last.ends() == expected:
        print(f"\nall {expected.total()} tasks ended as expected")
        return 0
    print(f"\n{last.ended} of {expected.total()} tasks ended, not all as expected")
    return 1


def main() -> int:
    # What it warns of, tasks that are dead, is on the screen.
    logging.getLogger("windlass").setLevel(logging.ERROR)
    try:
        return asyncio.run(open_shop())
    except KeyboardInterrupt:
        print("\nstopped; what had not ended waits for the next worker")
        return 130


if __name__ == "__main__":
    sys.exit(main())
