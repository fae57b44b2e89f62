"""What the metrics cost: instructions per task of a worker and of a producer, with them and without.

Needs valgrind, and counts with callgrind. What a task costs is the difference between few tasks and many,
with the seam off: nobody watches. What the metrics add is far less than two runs differ by chance (batches
fall otherwise, polls and heartbeats follow the clock), so the batches of a run of their own are kept, and
told to the metrics many times. Compare the medians of several rounds; on a busy machine batches are small.
"""

import argparse
import asyncio
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from windlass import App
from windlass.runtime.metrics import Metrics
from windlass.store.postgres.embedded import EmbeddedServer
from windlass.telemetry import tell, unwatch, watch

REPEATS = 50


def new_app(url: str, concurrency: int) -> App:
    app = App(url, concurrency=concurrency)

    @app.task
    async def nothing(n: int) -> None: ...

    return app


async def fill(url: str, concurrency: int, tasks: int) -> None:
    async with new_app(url, concurrency) as app:
        work = app.tasks[0]
        await app.enqueue_many([work.call(n) for n in range(tasks)])


async def drain(url: str, concurrency: int, _: int) -> None:
    async with new_app(url, concurrency) as app:
        await app.run_worker(until_idle=True)


ROLES = {"worker": drain, "producer": fill}


async def play(role: str, url: str, concurrency: int, tasks: int, repeats: int) -> None:
    """Do the work of a role; with repeats, tell the metrics of it that often."""
    told: list[tuple[str, Any]] = []

    def keep(event: str, batch: Any) -> None:
        told.append((event, batch))

    if repeats:
        watch(keep)
    await ROLES[role](url, concurrency, tasks)
    unwatch(keep)
    watch(Metrics(lambda: (0, 0), lambda: True))
    for _ in range(repeats):
        for event, batch in told:
            tell(event, batch)
    sizes = [len(batch.tasks) for event, batch in told if event in {"claimed", "enqueued"}]
    if sizes:
        print(f"{sum(sizes) / len(sizes):.0f} tasks at once", file=sys.stderr)


def instructions(
    role: str, url: str, tasks: int, concurrency: int, repeats: int = 0
) -> tuple[int, str]:
    if role == "worker":
        asyncio.run(fill(url, concurrency, tasks))
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [
                *("valgrind", "--tool=callgrind", f"--callgrind-out-file={folder}/out"),
                *(sys.executable, __file__, "--role", role, "--database", url),
                *("--tasks", str(tasks), "--concurrency", str(concurrency)),
                *("--repeats", str(repeats)),
            ],
            capture_output=True,
            text=True,
            check=True,
        )
    if role == "producer":
        asyncio.run(drain(url, 500, 0))
    (total,) = re.findall(r"Collected : (\d+)", done.stderr)
    batches = re.findall(r"\d+ tasks at once", done.stderr)
    return int(total), batches[0] if batches else ""


def compare(role: str, url: str, tasks: int, concurrency: int) -> float:
    few, _ = instructions(role, url, tasks, concurrency)
    many, _ = instructions(role, url, 3 * tasks, concurrency)
    shown, batches = instructions(role, url, 3 * tasks, concurrency, REPEATS)
    task = (many - few) / (2 * tasks)
    metrics = (shown - many) / (REPEATS * 3 * tasks)
    print(
        f"{role}, concurrency {concurrency}, {batches}: {task:,.0f} instructions per task, "
        f"{metrics:,.0f} more with metrics, {metrics / task:+.1%}",
        flush=True,
    )
    return metrics / task


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--role", choices=ROLES, help="only this one")
    parser.add_argument("--database", help=argparse.SUPPRESS)
    parser.add_argument("--repeats", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--tasks", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, action="append")
    given = parser.parse_args()
    if given.database:
        asked = (given.role, given.database, given.concurrency[0], given.tasks, given.repeats)
        asyncio.run(play(*asked))
        return
    with tempfile.TemporaryDirectory() as folder:
        server = EmbeddedServer.acquire(Path(folder) / "postgres", settings={"fsync": "off"})
        try:
            for role in [given.role] if given.role else ROLES:
                for concurrency in given.concurrency or (20, 100, 500):
                    ratios = [
                        compare(role, server.url, given.tasks, concurrency)
                        for _ in range(given.rounds)
                    ]
                    print(f"{role}, concurrency {concurrency}: {statistics.median(ratios):+.1%}")
        finally:
            server.release()


if __name__ == "__main__":
    main()
