"""A PostgreSQL of the run's own, to restart in every way there is."""

import asyncio
import os
import signal
import time
from pathlib import Path

import asyncpg

from windlass.store.postgres.embedded import EmbeddedServer
from windlass.store.postgres.embedded_start import Place

RESTARTS = {"fast": signal.SIGINT, "immediate": signal.SIGQUIT, "kill": signal.SIGKILL}
DEADLINE = 60.0
SETTINGS = {"fsync": "off", "max_connections": "200"}


class Server:
    """Started when made; `outages` says from when to when nobody could reach it."""

    def __init__(self, directory: Path) -> None:
        self._place = Place(directory)
        self._held: list[EmbeddedServer] = []
        self._acquire()
        self.url = self._held[0].url
        self.outages: list[tuple[float, float]] = []

    def _acquire(self) -> None:
        self._held.append(EmbeddedServer.acquire(self._place.directory, settings=SETTINGS))

    async def restart(self, how: str) -> None:
        """End it, and start it again as soon as it has ended."""
        began = time.time()
        await asyncio.to_thread(self._restart, RESTARTS[how])
        self.outages.append((began, time.time()))

    def _restart(self, way: signal.Signals) -> None:
        process = self._place.serving_process()
        assert process is not None
        os.kill(process, way)
        deadline = time.monotonic() + DEADLINE
        while self._place.serving_process() == process:
            assert time.monotonic() < deadline, "the server does not end"
            time.sleep(0.01)
        self._acquire()
        assert self._held[-1].url == self.url

    async def connect(self) -> asyncpg.Connection:
        return await asyncpg.connect(self.url)

    async def terminate_one(self, number: int) -> bool:
        """End a session of the application; which one, the number says."""
        connection = await self.connect()
        try:
            rows = await connection.fetch(
                "SELECT pid FROM pg_stat_activity WHERE application_name = 'windlass' ORDER BY pid"
            )
            if rows:
                pid = rows[number % len(rows)]["pid"]
                await connection.execute("SELECT pg_terminate_backend($1)", pid)
            return bool(rows)
        finally:
            await connection.close()

    def release(self) -> list[str]:
        """Stop it; return what is left of it."""
        for server in self._held:
            server.release()
        left = []
        if self._place.serving_process() is not None:
            left.append("the server still runs")
        if self._place.socket_folder.exists() and any(self._place.socket_folder.iterdir()):
            left.append(f"sockets in {self._place.socket_folder}")
        return left
