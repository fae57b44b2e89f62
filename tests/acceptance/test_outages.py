"""Workers in processes of their own beside a server that restarts, or does not answer."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import asyncpg
import pytest

from acceptance.quick import QUICK
from windlass import App
from windlass.store.postgres.embedded import EmbeddedServer
from windlass.store.postgres.embedded_start import Place

TASKS = 400
APP = """
import asyncio
from windlass import App

app = App()

@app.task
async def short(n: int) -> int:
    await asyncio.sleep(0.02)
    return n

@app.task
async def endless() -> None:
    print("started", flush=True)
    await asyncio.Event().wait()
"""


class Server:
    """A PostgreSQL that a test has for itself, to restart and to stop in its tracks."""

    def __init__(self, directory: Path) -> None:
        self._place = Place(directory)
        self._held: list[EmbeddedServer] = []
        self._acquire()
        self.url = self._held[0].url

    def _acquire(self) -> None:
        self._held.append(EmbeddedServer.acquire(self._place.directory, settings={"fsync": "off"}))

    def restart(self) -> None:
        """End every session at once, as `pg_ctl restart -m fast` does."""
        process = self._process()
        os.kill(process, signal.SIGINT)
        until(lambda: self._place.serving_process() != process)
        self._acquire()
        assert self._held[-1].url == self.url

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop its processes in their tracks: that which accepts sessions, and theirs."""
        stopped = [self._process()]

        async def stop_sessions() -> None:
            connection = await asyncpg.connect(self.url)
            os.kill(stopped[0], signal.SIGSTOP)  # no session begins after they were listed
            rows = await connection.fetch(
                "SELECT pid FROM pg_stat_activity WHERE application_name = 'windlass'"
            )
            for row in rows:
                with suppress(ProcessLookupError):  # it has ended by itself meanwhile
                    os.kill(row["pid"], signal.SIGSTOP)
                    stopped.append(row["pid"])
            connection.terminate()

        try:
            asyncio.run(stop_sessions())
            assert len(stopped) > 1
            yield
        finally:
            for process in stopped:
                os.kill(process, signal.SIGCONT)

    def release(self) -> None:
        for server in self._held:
            server.release()

    def _process(self) -> int:
        process = self._place.serving_process()
        assert process is not None
        return process


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path / "server")
    yield server
    server.release()


@pytest.fixture
def start(tmp_path: Path, server: Server) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    (tmp_path / "shop.py").write_text(APP)
    environment = {
        **os.environ,
        "WINDLASS_DATABASE_URL": server.url,
        **{f"WINDLASS_{name.upper()}": str(value) for name, value in QUICK.items()},
    }
    with (tmp_path / "worker.log").open("a") as log, ExitStack() as workers:

        def start(*arguments: str) -> subprocess.Popen[str]:
            worker = subprocess.Popen(
                [sys.executable, "-m", "windlass.cli", "worker", "shop:app", *arguments],
                cwd=tmp_path,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
            workers.enter_context(worker)
            workers.callback(worker.kill)
            return worker

        yield start


def until(said: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not said():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def completed(url: str) -> int:
    async def ask() -> int:
        connection = await asyncpg.connect(url)
        count = await connection.fetchval(
            "SELECT count(*) FROM windlass.tasks WHERE status = 'completed'"
        )
        await connection.close()
        return int(count)

    return asyncio.run(ask())


async def enqueue(url: str, name: str, count: int) -> None:
    async with App(url) as app:
        for n in range(count):
            await app.enqueue(name, {"n": n} if name == "short" else {})


def test_workers_live_through_fast_restarts_and_lose_nothing(
    server: Server, start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    asyncio.run(enqueue(server.url, "short", TASKS))
    workers = [start("--concurrency", "2") for _ in range(2)]
    for part in (1, 2):
        until(lambda part=part: completed(server.url) >= part * TASKS // 4)  # type: ignore[misc]
        server.restart()
    until(lambda: completed(server.url) == TASKS)

    for worker in workers:
        worker.send_signal(signal.SIGTERM)
    said = (tmp_path / "worker.log").read_text()
    assert [worker.wait(30) for worker in workers] == [0, 0], said
    assert "store.unavailable" in said
    assert "Traceback" not in said


def test_a_worker_on_a_server_that_does_not_answer_can_be_stopped(
    server: Server, start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    asyncio.run(enqueue(server.url, "endless", 1))
    worker = start("--shutdown-timeout", "0.5")
    assert worker.stdout is not None
    assert worker.stdout.readline() == "started\n"
    with server.stopped():
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(60) == 0
    assert "settlement.abandoned tasks=1\n" in (tmp_path / "worker.log").read_text()


async def test_a_worker_that_fails_cancels_the_block_beside_it(
    database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    connection = await asyncpg.connect(database_url)
    async with App(database_url, **QUICK) as app:

        @app.task
        async def quiet() -> None: ...

        limit = asyncio.timeout(30)

        async def serve_for_ever() -> None:
            async with limit, app.worker():
                await connection.execute("ALTER FUNCTION windlass.claim_tasks RENAME TO gone")
                await asyncio.Event().wait()

        with pytest.raises(asyncpg.UndefinedFunctionError):
            await serve_for_ever()
    await connection.close()

    assert not limit.expired()
    assert "service.failed service=windlass-fetcher error=UndefinedFunctionError" in caplog.text
