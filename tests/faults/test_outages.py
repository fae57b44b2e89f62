"""Workers beside a server that restarts, ends sessions, has none to spare, or does not answer."""

import asyncio
import json
import random
import signal
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from acceptance.probes import fetch
from acceptance.quick import QUICK
from contract.pgbouncer import Pooler
from faults.conftest import Start
from faults.looking import LEFT, run
from faults.processes import WorkerProcess, until
from faults.servers import SESSIONS, Server
from slowly import slowly
from windlass import App
from windlass.model.errors import StoreUnavailable
from windlass.runtime import worker as worker_module

TASKS = 400
KILLS = 60
PATIENT: dict[str, Any] = {**QUICK, "lease": 30, "heartbeat": 1}  # no outage takes so long
COMPLETED = "SELECT count(*) FROM windlass.tasks WHERE status = 'completed'"


async def enqueue(url: str, name: str, count: int = 1) -> None:
    async with App(url) as app:
        for n in range(count):
            await app.enqueue(name, {"n": n}, max_attempts=10)


def completed(url: str) -> int:
    return int(run(url, COMPLETED)[0][0])


def runs(folder: Path) -> Counter[str]:
    ledger = folder / "ledger"
    lines = ledger.read_text().splitlines() if ledger.exists() else []
    return Counter(line.rpartition(" ")[0] for line in lines)


@pytest.mark.parametrize(
    "how",
    slowly([signal.SIGINT, signal.SIGQUIT, signal.SIGKILL], lambda how: how is signal.SIGQUIT),
)
def test_workers_live_through_restarts_and_lose_nothing(
    server: Server, way: str, start: Start, tmp_path: Path, how: signal.Signals
) -> None:
    workers = [start(url=way, settings=PATIENT, arguments=("--concurrency", "4")) for _ in range(2)]

    lose_nothing(server, workers, tmp_path, lambda: server.restart(how))


def test_workers_live_through_the_ends_of_their_pooler_and_lose_nothing(
    server: Server, start: Start, tmp_path: Path
) -> None:
    with Pooler.running(server.url) as pooler:
        way, settings = pooler.url(server.url), {**PATIENT, "pooler": True}
        few = ("--concurrency", "4")
        workers = [start(url=way, settings=settings, arguments=few) for _ in range(2)]

        lose_nothing(server, workers, tmp_path, pooler.kill)


def lose_nothing(
    server: Server, workers: Sequence[WorkerProcess], folder: Path, fault: Callable[[], None]
) -> None:
    """Let workers work off tasks while a fault comes twice."""
    asyncio.run(enqueue(server.url, "across", 2))
    asyncio.run(enqueue(server.url, "short", TASKS))
    for part in (1, 2):
        until(lambda part=part: completed(server.url) >= part * TASKS // 4)  # type: ignore[misc]
        fault()
    until(lambda: completed(server.url) == TASKS)
    (folder / "across.go").touch()
    until(lambda: run(server.url, LEFT)[0][0] == 0)

    for worker in workers:
        assert worker.stop() == 0, worker.said()
        assert "Traceback" not in worker.said()
    assert any("store.unavailable" in worker.said() for worker in workers)
    assert completed(server.url) == TASKS + 2
    # They ran on meanwhile, and their leases held.
    assert [runs(folder)[f"across {n}"] for n in range(2)] == [1, 1]


def test_workers_live_through_the_end_of_any_of_their_sessions(
    server: Server, way: str, start: Start
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    asyncio.run(enqueue(way, "short", TASKS))
    workers = [start(url=way, settings=PATIENT, arguments=("--concurrency", "2")) for _ in range(2)]

    async def kill_sessions() -> None:
        connection = await asyncpg.connect(server.url)
        killed = 0
        while killed < KILLS:
            if sessions := [row["pid"] for row in await connection.fetch(SESSIONS)]:
                victim = chance.choice(sessions)
                killed += await connection.fetchval("SELECT pg_terminate_backend($1)", victim)
            await asyncio.sleep(0.05)  # the pace of the kills, not a wait for anything
        await connection.close()

    asyncio.run(kill_sessions())
    asyncio.run(enqueue(way, "short", 10))
    until(lambda: run(server.url, LEFT)[0][0] == 0)

    for worker in workers:
        assert worker.stop() == 0, worker.said()
        assert "Traceback" not in worker.said()
    assert completed(server.url) == TASKS + 10


@pytest.mark.needs_direct("a pooler opens none while it has a session to lend")
def test_a_server_without_a_connection_to_spare_costs_no_lease(
    server: Server, way: str, start: Start, tmp_path: Path
) -> None:
    asyncio.run(enqueue(way, "across"))
    worker = start(url=way, settings=QUICK)
    until(lambda: runs(tmp_path)["across 0"] == 1)

    async def take_every_connection() -> None:
        async with AsyncExitStack() as taken:
            connection = await asyncpg.connect(server.url)
            taken.push_async_callback(connection.close)
            with suppress(asyncpg.TooManyConnectionsError):
                while True:
                    one = await asyncpg.connect(server.url)
                    taken.push_async_callback(one.close)
            with pytest.raises(StoreUnavailable, match="too many clients"):
                await enqueue(way, "short")
            # A lease later it is still held: the heart has a connection of its own.
            expiry = "SELECT expires_at FROM windlass.claim"
            granted_until = await connection.fetchval(expiry)
            while await connection.fetchval("SELECT clock_timestamp() < $1", granted_until):
                await asyncio.sleep(0.05)
            assert await connection.fetchval(f"SELECT ({expiry}) > $1", granted_until)

    asyncio.run(take_every_connection())
    (tmp_path / "across.go").touch()
    asyncio.run(enqueue(way, "short"))
    until(lambda: completed(server.url) == 2)

    assert worker.stop() == 0, worker.said()
    assert runs(tmp_path)["across 0"] == 1


@pytest.mark.needs_direct("a pooler has connections for all, and as many sessions as it may")
def test_more_workers_than_a_server_has_connections_for_take_turns(
    start: Start, tmp_path: Path
) -> None:
    server = Server(tmp_path / "server", max_connections="12", superuser_reserved_connections="0")
    try:
        asyncio.run(enqueue(server.url, "short", 100))
        workers = [start(url=server.url, settings=PATIENT) for _ in range(6)]
        until(lambda: sum("worker.started" in worker.said() for worker in workers) >= 2)
        until(lambda: any("too many clients" in worker.said() for worker in workers))
        for worker in workers:
            assert worker.stop() == 0, worker.said()
            assert "Traceback" not in worker.said()
        assert completed(server.url) == 100
    finally:
        server.release()


def test_a_worker_on_a_server_that_does_not_answer_can_be_stopped(
    server: Server, way: str, start: Start, tmp_path: Path
) -> None:
    asyncio.run(enqueue(way, "across"))
    worker = start(url=way, settings=QUICK, arguments=("--shutdown-timeout", "0.5"))
    until(lambda: runs(tmp_path)["across 0"] == 1)
    with server.stopped():
        assert worker.stop() == 1  # not a clean drain: the task runs again
    assert "settlement.abandoned tasks=1\n" in worker.said()


async def test_a_worker_that_could_not_write_everything_is_listed_until_its_claims_were_taken_back(
    database_url: str, watcher: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "FLUSH_WITHIN", 0.2)
    async with App(database_url, **QUICK) as app:
        ran = asyncio.Event()

        @app.task
        async def one() -> None:
            ran.set()

        holding = watcher.transaction()
        await holding.start()
        handle = await one.enqueue()
        await watcher.execute("SELECT FROM windlass.task FOR UPDATE")
        async with app.worker(), asyncio.timeout(30):
            await ran.wait()
        assert len(await (await app.store()).workers()) == 1
        await holding.rollback()

        async with app.worker():
            await handle.result(timeout=30)
            async with asyncio.timeout(30):
                while len(await (await app.store()).workers()) > 1:
                    await asyncio.sleep(0.05)


async def test_a_worker_that_fails_cancels_the_block_beside_it(
    database_url: str, watcher: asyncpg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    async with App(database_url, **QUICK) as app:

        @app.task
        async def quiet() -> None: ...

        limit = asyncio.timeout(30)

        async def serve_for_ever() -> None:
            async with limit, app.worker():
                await watcher.execute("ALTER FUNCTION windlass.claim_batches RENAME TO gone")
                await asyncio.Event().wait()

        with pytest.raises(asyncpg.UndefinedFunctionError):
            await serve_for_ever()

    assert not limit.expired()
    assert "service.failed service=windlass-fetcher error=UndefinedFunctionError" in caplog.text


def test_a_worker_waits_for_a_database_that_starts_later_than_it_does(
    server: Server, way: str, start: Start, tmp_path: Path
) -> None:
    asyncio.run(enqueue(way, "short"))
    server.release()
    worker = start(url=way, settings=QUICK)
    until(lambda: worker.has_said("store.unavailable doing=open"))
    later = Server(tmp_path / "server")
    try:
        assert later.url == server.url
        until(lambda: completed(server.url) == 1)
        assert worker.stop() == 0, worker.said()
    finally:
        later.release()


def test_a_worker_that_waits_for_its_database_can_be_stopped(start: Start, tmp_path: Path) -> None:
    worker = start(url=f"postgresql://nobody@/none?host={tmp_path}")
    until(lambda: worker.has_said("store.unavailable doing=open"))

    assert worker.stop() == 0


def test_a_worker_whose_server_does_not_answer_is_alive_and_not_ready_until_it_does(
    server: Server, way: str, start: Start
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    worker = start(url=way, settings={**PATIENT, "health_port": port})
    until(lambda: "worker.started" in worker.said())
    until(lambda: fetch(port, "/readyz")[0] == 200)

    with server.stopped():
        status, body = fetch(port, "/readyz")
        alive, _ = fetch(port, "/livez")

    assert status == 503
    assert "the store gave no answer within 5 s" in json.loads(body)["checks"]["store"]
    assert alive == 200
    until(lambda: fetch(port, "/readyz")[0] == 200)
    assert worker.stop() == 0, worker.said()
