"""What a PgBouncer in transaction mode costs: a drain, single calls, and how soon a task starts.

Direct and pooled rounds take turns, so that what else happens on the machine befalls both. Look at
the ratios. Needs the program `pgbouncer`, and what the tests need.

    python bench/pooler.py [--tasks 30000] [--rounds 5] [--starts 40]
"""

import argparse
import asyncio
import os
import random
import signal
import statistics
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import asyncpg
import uvloop

from windlass import App, TaskSet
from windlass.store.postgres.embedded import EmbeddedServer

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from contract.pgbouncer import Pooler

SESSIONS = 20
CALLS = 1000
CONCURRENCY = 500

NOOPS = TaskSet()


@NOOPS.task(name="noop")
async def noop(number: int) -> None:
    pass


class Drained(NamedTuple):
    rate: float  # tasks per second
    cpu: float  # microseconds of this process per task


async def by_worker(url: str, connection: asyncpg.Connection, tasks: int) -> Drained:
    app = App(url)
    app.include(NOOPS)
    async with app:
        await app.enqueue_many([noop.call(number) for number in range(tasks)])
        # Or the first statements would pay for statistics and for whole pages after a checkpoint.
        await connection.execute("VACUUM ANALYZE")
        await connection.execute("CHECKPOINT")
        cpu, began = time.process_time(), time.perf_counter()
        await app.run_worker(concurrency=CONCURRENCY, until_idle=True)
        seconds = time.perf_counter() - began
        return Drained(tasks / seconds, (time.process_time() - cpu) / tasks * 1e6)


async def drain(direct: str, pooled: str, tasks: int, rounds: int) -> None:
    connection = await asyncpg.connect(direct)

    async def once(url: str) -> Drained:
        os.environ["WINDLASS_POOLER"] = str(url == pooled).lower()
        return await by_worker(url, connection, tasks)

    ratios = []
    for number in range(1, rounds + 1):
        ways = [direct, pooled] if number % 2 else [pooled, direct]
        drained = {url: await once(url) for url in ways}
        ratios.append(drained[pooled].rate / drained[direct].rate)
        print(
            f"round {number}: direct {drained[direct].rate:,.0f}/s "
            f"({drained[direct].cpu:.1f} µs of Python per task), "
            f"pooled {drained[pooled].rate:,.0f}/s ({drained[pooled].cpu:.1f} µs), "
            f"ratio {ratios[-1]:.2f}",
            flush=True,
        )
    print(f"median ratio {statistics.median(ratios):.2f}")
    await connection.close()
    os.environ.pop("WINDLASS_POOLER")


async def call(direct: str, pooled: str, number: int) -> None:
    """One enqueue after the other, each waited for."""
    took: dict[str, list[float]] = {"direct": [], "pooled": []}
    async with App(direct) as around, App(pooled, pooler=True) as through:
        for _ in range(number):
            for name, app in (("direct", around), ("pooled", through)):
                began = time.perf_counter()
                await app.enqueue("note", {})
                took[name].append(1000 * (time.perf_counter() - began))
    for name, times in took.items():
        print(f"{name}: an enqueue takes {statistics.median(times):.2f} ms")


async def starts(app: App, number: int) -> list[float]:
    """Milliseconds from the call of enqueue until the handler runs, in a worker that was idle."""
    took: list[float] = []
    started = asyncio.Event()

    @app.task
    async def note(asked_at: float) -> None:
        took.append(1000 * (time.perf_counter() - asked_at))
        started.set()

    async with app, app.worker():
        for _ in range(number):
            await asyncio.sleep(random.uniform(2, 3))  # until it polls as seldom as it ever does
            started.clear()
            await note.enqueue(time.perf_counter())
            await started.wait()
    return took


async def wait_for_starts(direct: str, pooled: str, number: int) -> None:
    ways = {
        "direct": App(direct, schema="one"),
        "pooled, with direct_url": App(pooled, schema="two", pooler=True, direct_url=direct),
        "pooled, without": App(pooled, schema="three", pooler=True),
    }
    for name, took in zip(
        ways, await asyncio.gather(*(starts(app, number) for app in ways.values())), strict=True
    ):
        print(f"{name}: starts after {statistics.median(took):.1f} ms, at worst {max(took):.0f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what a pooler costs.")
    parser.add_argument("--tasks", type=int, default=30_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--starts", type=int, default=40)
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the servers would be left behind
    with TemporaryDirectory() as folder:
        server = EmbeddedServer.acquire(Path(folder) / "postgres")
        try:
            with Pooler.running(server.url, sessions=SESSIONS) as pooler:
                pooled = pooler.url(server.url)
                uvloop.run(drain(server.url, pooled, asked.tasks, asked.rounds))
                uvloop.run(call(server.url, pooled, CALLS))
                uvloop.run(wait_for_starts(server.url, pooled, asked.starts))
        finally:
            server.release()


if __name__ == "__main__":
    main()
