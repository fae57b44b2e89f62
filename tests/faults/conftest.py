"""What tests break: a way through a proxy, and worker processes; and a way around, to look."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from acceptance.quick import QUICK
from contract.pgbouncer import BEHIND_POOLER, Pooler
from faults.processes import WorkerProcess
from faults.proxy import Proxy
from faults.said import Said
from faults.scene import Scene, opened
from faults.servers import Server
from windlass.store.postgres import claiming, listener

Start = Callable[..., WorkerProcess]
FOR_EVER = 1e6  # seconds


@pytest.fixture
async def watcher(sql_url: str) -> AsyncIterator[asyncpg.Connection]:
    """A session beside what is tested: what is really in the database."""
    connection = await asyncpg.connect(sql_url)
    yield connection
    await connection.close()


@pytest.fixture
async def proxy(tested_server_url: str) -> AsyncIterator[Proxy]:
    """Before the server, for whatever is given `proxy.url(...)` of one of its databases."""
    async with Proxy(tested_server_url) as proxy:
        yield proxy


@pytest.fixture
async def scene(
    database_url: str,
    proxy: Proxy,
    watcher: asyncpg.Connection,
    suite_pooler: Pooler | None,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Scene]:
    # What a store does by itself would come between the call and the proxy.
    monkeypatch.setattr(claiming, "LOOK_BEHIND_EVERY", FOR_EVER)
    scene = Scene(database_url, proxy=proxy, watcher=watcher, pooler=suite_pooler)
    async with opened(scene):
        yield scene


@pytest.fixture
def direct_url(sql_url: str) -> str | None:
    """The way around the pooler for who listens, if there is a pooler."""
    return sql_url if BEHIND_POOLER else None


@pytest.fixture
async def direct_proxy(sql_url: str) -> AsyncIterator[Proxy]:
    """Before the listener alone."""
    async with Proxy(sql_url) as proxy:
        yield proxy


@pytest.fixture
async def said() -> AsyncIterator[Said]:
    with Said.listening() as said:
        yield said


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a listener's dead connection be known soon, and be tried again soon."""
    monkeypatch.setattr(listener, "PROBE_EVERY", 0.05)
    monkeypatch.setattr(listener, "PROBED_WITHIN", 0.5)
    monkeypatch.setattr(listener, "CONNECT_WITHIN", 1.0)
    monkeypatch.setattr(listener, "ECHO_WITHIN", 2.0)
    monkeypatch.setattr(listener, "LONGEST_BACKOFF", 0.1)
    monkeypatch.setattr(listener, "LONGEST_UNTIL_MENDED", 0.1)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path / "server", max_connections="40")
    yield server
    server.release()


@pytest.fixture
def way(server: Server) -> Iterator[str]:
    """The URL of that server for what is tested."""
    with server.way() as url:
        yield url


@pytest.fixture
def start(tmp_path: Path, database_url: str) -> Iterator[Start]:
    """Start a worker, of `life_app` unless another is named, with failpoints if they are."""
    with ExitStack() as ending:
        numbers = count(1)

        def start(
            failpoints: str = "", *, application: str = "faults.life_app:app", **options: Any
        ) -> WorkerProcess:
            options = {"url": database_url, "settings": QUICK} | options
            worker = WorkerProcess(
                application,
                log=tmp_path / f"worker-{next(numbers)}.log",
                folder=tmp_path,
                failpoints=failpoints,
                **options,
            )
            ending.callback(worker.end)
            return worker

        yield start
