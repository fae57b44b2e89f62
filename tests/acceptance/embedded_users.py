"""Processes that use an embedded server, and what is to be seen of it from outside."""

import asyncio
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import asyncpg

from windlass import App
from windlass.store.postgres import embedded_start
from windlass.store.postgres.store import PostgresStore

FAST = {"fsync": "off"}
SOURCE = Path(embedded_start.__file__).parents[3]
USER = """
import sys
from pathlib import Path
from windlass.store.postgres.embedded import EmbeddedServer
server = EmbeddedServer.acquire(Path(sys.argv[1]), settings={"fsync": "off"})
print(server.url, flush=True)
sys.stdin.readline()
server.release()
"""


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(SOURCE), *filter(None, sys.path)])}


def query(url: str, statement: str) -> Any:
    async def run() -> Any:
        connection = await asyncpg.connect(url)
        try:
            return await connection.fetchval(statement)
        finally:
            await connection.close()

    return asyncio.run(run())


def postmaster(directory: Path) -> int:
    return int((directory / "data" / "postmaster.pid").read_text().split()[0])


def processes_of(directory: Path) -> list[int]:
    """Every living process of the server: all of them work in its data folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "cwd").readlink() == directory / "data":
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def wait_until(is_true: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


async def sessions_gone(app: App) -> None:
    """Wait until the driver has seen that its sessions ended: the next call opens a new one."""
    store = await app.store()
    assert isinstance(store, PostgresStore)
    assert store._run.pool is not None
    while store._run.pool.get_size():
        await asyncio.sleep(0.005)
