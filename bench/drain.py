"""How fast one worker drains no-op tasks, beside what the store alone allows in the same run.

Each round drains the same number of tasks twice: by a worker, and by a bare loop that claims and
settles batches of the same size and runs nothing. Only the ratio of the two says something about
the code: the rates themselves are those of a machine and a moment.

    python bench/drain.py [--tasks 50000] [--rounds 5] [--database URL]
"""

import argparse
import signal
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple
from uuid import uuid4

import asyncpg
import uvloop

from windlass import App, TaskSet
from windlass.model.task import ClaimRequest, Outcome, Settlement
from windlass.store.postgres.embedded import EmbeddedServer
from windlass.store.postgres.store import PostgresOptions, PostgresStore

BATCH = 500


class Drained(NamedTuple):
    rate: float  # tasks per second
    cpu: float  # microseconds of this process per task
    wal: float  # bytes per task


class Meter:
    """What it took to drain so many tasks."""

    def __init__(self, connection: asyncpg.Connection, tasks: int) -> None:
        self._connection = connection
        self._tasks = tasks

    async def start(self) -> None:
        # Or the first statements would pay for statistics and for whole pages after a checkpoint.
        await self._connection.execute("VACUUM ANALYZE")
        await self._connection.execute("CHECKPOINT")
        self._position = await self._connection.fetchval("SELECT pg_current_wal_insert_lsn()")
        self._cpu, self._began = time.process_time(), time.perf_counter()

    async def stop(self) -> Drained:
        seconds = time.perf_counter() - self._began
        cpu = time.process_time() - self._cpu
        written = await self._connection.fetchval(
            "SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), $1)", self._position
        )
        each = self._tasks
        return Drained(each / seconds, cpu / each * 1e6, float(written) / each)


NOOPS = TaskSet()


@NOOPS.task(name="noop")
async def noop(number: int) -> None:
    pass


def app_on(url: str) -> App:
    app = App(url)
    app.include(NOOPS)
    return app


async def by_worker(url: str, meter: Meter, tasks: int) -> Drained:
    async with app_on(url) as app:
        await app.enqueue_many([noop.call(number) for number in range(tasks)])
        await meter.start()
        await app.run_worker(concurrency=BATCH, until_idle=True)
        return await meter.stop()


async def by_store(url: str, meter: Meter, tasks: int) -> Drained:
    async with app_on(url) as app:
        await app.enqueue_many([noop.call(number) for number in range(tasks)])
    store = PostgresStore(PostgresOptions(url=url))
    await store.open()
    request = ClaimRequest(uuid4(), ("noop",), BATCH, timedelta(seconds=30), timedelta(seconds=6))
    await meter.start()
    while (claim := (await store.claim(request)).claim) is not None:
        await store.settle(
            [
                Settlement(claim.token, task.id, task.generation, Outcome.COMPLETED, 0.0)
                for task in claim.tasks
            ]
        )
    drained = await meter.stop()
    await store.close()
    return drained


async def run(url: str, tasks: int, rounds: int) -> None:
    connection = await asyncpg.connect(url)
    meter = Meter(connection, tasks)
    ratios = []
    for number in range(1, rounds + 1):
        worker = await by_worker(url, meter, tasks)
        store = await by_store(url, meter, tasks)
        ratios.append(worker.rate / store.rate)
        print(
            f"round {number}: worker {worker.rate:,.0f}/s ({worker.cpu:.1f} µs of Python, "
            f"{worker.wal:.0f} B of WAL per task), store alone {store.rate:,.0f}/s, "
            f"ratio {ratios[-1]:.2f}",
            flush=True,
        )
    print(f"median ratio {statistics.median(ratios):.2f}")
    await connection.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Drain no-op tasks.")
    parser.add_argument("--tasks", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--database", help="a URL; without it an embedded server is started")
    asked = parser.parse_args()
    if asked.database:
        uvloop.run(run(asked.database, asked.tasks, asked.rounds))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the server would be left behind
    with TemporaryDirectory() as folder:
        server = EmbeddedServer.acquire(Path(folder) / "postgres")
        try:
            uvloop.run(run(server.url, asked.tasks, asked.rounds))
        finally:
            server.release()


if __name__ == "__main__":
    main()
