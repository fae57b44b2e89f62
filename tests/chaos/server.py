"""The PostgreSQL of a run: when nobody could reach it, sessions to end, and what is left of it."""

import asyncio
import signal
import time
from pathlib import Path

import asyncpg

from faults.servers import Server

RESTARTS = {"fast": signal.SIGINT, "immediate": signal.SIGQUIT, "kill": signal.SIGKILL}


class ChaosServer(Server):
    """`outages` says from when to when nobody could reach it."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, max_connections="200")
        self.outages: list[tuple[float, float]] = []

    async def restart_by(self, how: str) -> None:
        """End it, and start it again as soon as it has ended."""
        began = time.time()
        await asyncio.to_thread(self.restart, RESTARTS[how])
        self.outages.append((began, time.time()))

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

    def leftovers(self) -> list[str]:
        """What is left of it once it was released."""
        left = []
        if self._place.serving_process() is not None:
            left.append("the server still runs")
        if self._place.socket_folder.exists() and any(self._place.socket_folder.iterdir()):
            left.append(f"sockets in {self._place.socket_folder}")
        return left
