"""Ten minutes of chaos, seeded; prints what happened, and ends with 1 if a promise was broken.

CHAOS_SECONDS says how long, CHAOS_SEED repeats a run's choices.
"""

import asyncio
import logging
import os
import random
import sys
import tempfile
import time
from pathlib import Path

import asyncpg

from chaos.fleet import Fleet
from chaos.report import Outcome, tell
from chaos.server import ChaosServer
from chaos.settings import AGAIN, LONG, SETTINGS, SWEEP, TERM
from chaos.world import PRODUCERS, World
from faults.proxy import Proxy
from windlass import App
from windlass.testing.history_check import ClientLog, Quiet, read_history, record

WORKERS = 4
BACKOFF = 5.0  # the longest pause of a worker that could not reach the database
# One that has just claimed a suspect finishes what it runs first, and then runs it with nothing beside it.
BACK_WITHIN = BACKOFF + 2 * (LONG + AGAIN)
DRAIN_WITHIN = 120.0
TASKS_PER_SECOND = (
    50  # beside new ones, while workers come back: a third of what all of them can do
)
SLOTS = WORKERS * int(SETTINGS["concurrency"])
TO_DO = """
SELECT
    (SELECT count(*) FROM windlass.ready),
    (SELECT coalesce(sum(cardinality(task_ids)), 0)::integer FROM windlass.claim_task)
"""
LEFT = """
SELECT
    (SELECT count(*) FROM windlass.task) AS tasks,
    (SELECT count(*) FROM windlass.worker WHERE pid = ANY ($1)) AS workers,
    (SELECT count(*) FROM windlass.worker WHERE pid <> ALL ($1)) AS lost
"""
PLACES = ("claim", "claim_task", "ready", "scheduled", "running", "attempt", "task", "worker")
SESSIONS = """
SELECT count(*) FROM pg_stat_activity a
WHERE a.datname = current_database() AND a.pid <> pg_backend_pid() AND a.backend_type = 'client backend'
"""


async def main() -> int:
    seconds = float(os.environ.get("CHAOS_SECONDS", "600"))
    seed = int(os.environ.get("CHAOS_SEED") or random.randrange(2**32))
    print(f"seed {seed}, {seconds:.0f} s of faults", flush=True)
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # the proxy writes to whom it has cut off
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        folder = Path(name)
        server = ChaosServer(folder / "server")
        try:
            outcome = await run(server, folder, seed, seconds)
        finally:
            server.release()
        return tell(outcome, [*outcome.left, *server.leftovers()], seed)


async def run(server: ChaosServer, folder: Path, seed: int, seconds: float) -> Outcome:
    async with App(server.url):
        pass  # migrates
    connection = await server.connect()
    await record(connection)
    await connection.close()
    calls = folder / "calls.jsonl"
    async with Proxy(server.url) as proxy, App(proxy.url(server.url), **SETTINGS) as app:
        fleet = Fleet(proxy.url(server.url), folder, "chaos.application:app", WORKERS)
        world = World(server, proxy, fleet, ClientLog(calls), app, seed)
        try:
            await until(world, all_done=False)
            producers = [asyncio.create_task(world.produce(one)) for one in range(PRODUCERS)]
            await world.rage(seconds)
            await world.calm_down()
            await until(world, all_done=False)
            since, backlog, held = time.time(), *await tasks_to_do(server)
            await asyncio.sleep(BACK_WITHIN + 3)  # work enough for everybody to come back to
            world.producing = False
            await asyncio.gather(*producers)
            await until(world, all_done=True)
            quiet = Quiet(
                since=since,
                until=time.time(),
                sweep=SWEEP,
                term=TERM,
                # What lost workers hold comes back meanwhile, and takes longer the second time.
                queueing=3.0 + backlog / TASKS_PER_SECOND + held * AGAIN / SLOTS,
                backoff=BACK_WITHIN,
                workers=await workers(server, fleet),
            )
            codes = await asyncio.to_thread(fleet.terminate)
            troubles = [f"a worker ended with code {code}" for code in codes if code]
        except BaseException:
            print(fleet.log.read_text()[-5000:])
            raise
        finally:
            fleet.end()
    connection = await server.connect()
    troubles += await leftovers(connection)
    history = await read_history(connection, calls=[calls], runs=[folder / "runs.jsonl"])
    await connection.close()
    log = fleet.log.read_text()
    if "Traceback" in log:
        troubles.append("a traceback in the workers' log")
    return Outcome(world, history, quiet, SWEEP + 1, troubles, log)


async def until(world: World, *, all_done: bool) -> None:
    """Wait until every worker is registered; or also until no task and no lost worker is left."""
    deadline = time.monotonic() + DRAIN_WITHIN
    fleet, left = world.fleet, {}
    connection = await world.server.connect()
    while time.monotonic() < deadline:
        world.look_after_workers()
        left = dict(await connection.fetchrow(LEFT, fleet.pids()))
        if left["workers"] == fleet.size and not (all_done and left["tasks"] + left["lost"]):
            await connection.close()
            return
        await asyncio.sleep(0.2)
    raise TimeoutError(f"after {DRAIN_WITHIN:.0f} s there are {left}")


async def tasks_to_do(server: ChaosServer) -> tuple[int, int]:
    """Count what waits for a slot when the faults are over, which goes first, and what is held."""
    connection = await server.connect()
    ready, held = await connection.fetchrow(TO_DO)
    await connection.close()
    return ready, held


async def workers(server: ChaosServer, fleet: Fleet) -> frozenset[str]:
    connection = await server.connect()
    rows = await connection.fetch(
        "SELECT id FROM windlass.worker WHERE pid = ANY ($1)", fleet.pids()
    )
    await connection.close()
    return frozenset(str(row["id"]) for row in rows)


async def leftovers(connection: asyncpg.Connection) -> list[str]:
    """Rows, sessions and locks that should be gone once all workers have left."""
    left = []
    for place in PLACES:
        rows = await connection.fetchval(f"SELECT count(*) FROM windlass.{place}")
        if rows:
            left.append(f"{rows} rows in {place}")
    deadline = time.monotonic() + 10  # for the server to see that its clients have gone
    while sessions := await connection.fetchval(SESSIONS):
        if time.monotonic() > deadline:
            left.append(f"{sessions} sessions")
            break
        await asyncio.sleep(0.1)
    return left


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
