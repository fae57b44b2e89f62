"""What the metrics cost: instructions per task of a worker's process, with them and without.

Needs valgrind. Counts with callgrind, so nothing else on the machine matters. What a task costs a worker is
the difference between draining few and many. What the metrics add is far less than two drains differ by
chance (batches fall otherwise), so the worker's own batches are kept and shown to the metrics many times.
"""

import argparse
import asyncio
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from windlass import App
from windlass.runtime.metrics import Metrics
from windlass.store.postgres.embedded import EmbeddedServer
from windlass.telemetry import watch

REPEATS = 50


def new_app(url: str, concurrency: int) -> App:
    app = App(url, concurrency=concurrency)

    @app.task
    async def nothing(n: int) -> None: ...

    return app


async def fill(url: str, tasks: int) -> None:
    async with new_app(url, 1) as app:
        work = app.tasks[0]
        await app.enqueue_many([work.call(n) for n in range(tasks)])


async def drain(url: str, concurrency: int, repeats: int) -> None:
    told: list[tuple[str, Any]] = []
    watch(lambda event, batch: told.append((event, batch)))
    async with new_app(url, concurrency) as app:
        await app.run_worker(until_idle=True)
    metrics = Metrics(lambda: (0, 0), lambda: True)
    for _ in range(repeats):
        for event, batch in told:
            metrics(event, batch)
    sizes = [len(batch.tasks) for event, batch in told if event == "claimed"]
    print(f"tasks per claim: {sum(sizes) / len(sizes):.0f}", file=sys.stderr)


def instructions(url: str, tasks: int, concurrency: int, repeats: int = 0) -> tuple[int, str]:
    asyncio.run(fill(url, tasks))
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [
                *("valgrind", "--tool=callgrind", f"--callgrind-out-file={folder}/out"),
                *(sys.executable, __file__, "--drain", url),
                *("--concurrency", str(concurrency), "--repeats", str(repeats)),
            ],
            capture_output=True,
            text=True,
            check=True,
        )
    (total,) = re.findall(r"Collected : (\d+)", done.stderr)
    (batches,) = re.findall(r"tasks per claim: \d+", done.stderr)
    return int(total), batches


def compare(url: str, tasks: int, concurrency: int) -> str:
    few, _ = instructions(url, tasks, concurrency)
    many, _ = instructions(url, 3 * tasks, concurrency)
    shown, batches = instructions(url, 3 * tasks, concurrency, REPEATS)
    task = (many - few) / (2 * tasks)
    metrics = (shown - many) / (REPEATS * 3 * tasks)
    return (
        f"concurrency {concurrency}, {batches}: {task:,.0f} instructions per task, "
        f"{metrics:,.0f} more with metrics, {metrics / task:+.1%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--drain", metavar="URL", help=argparse.SUPPRESS)
    parser.add_argument("--repeats", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--tasks", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, action="append")
    given = parser.parse_args()
    if given.drain:
        asyncio.run(drain(given.drain, given.concurrency[0], given.repeats))
        return
    with tempfile.TemporaryDirectory() as folder:
        server = EmbeddedServer.acquire(Path(folder) / "postgres", settings={"fsync": "off"})
        try:
            for concurrency in given.concurrency or (20, 100, 500):
                print(compare(server.url, given.tasks, concurrency))
        finally:
            server.release()


if __name__ == "__main__":
    main()
