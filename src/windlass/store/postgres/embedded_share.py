"""One embedded server for all event loops of an app."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

from windlass.model.errors import StoreUnavailable
from windlass.service import in_thread
from windlass.store.postgres.embedded import EmbeddedServer, find_directory


class SharedServer:
    """Held once, from the first event loop that joins until the last one has left."""

    def __init__(self, directory: Path | None, *, found: Callable[[Path], None]) -> None:
        self._directory = directory
        self._found = found  # told where the data lies, once it is held
        self._lock = threading.Lock()
        self._server: EmbeddedServer | None = None
        self._loops: set[asyncio.AbstractEventLoop] = set()

    async def join(self) -> str:
        """Return the URL for the running event loop; start the server if nobody has yet."""
        return await in_thread(self._join, asyncio.get_running_loop())

    async def leave(self) -> None:
        """Leave, if the running event loop has joined; the last one gives up the hold."""
        loop = asyncio.get_running_loop()
        if loop in self._loops:
            await in_thread(self._leave, loop)

    async def revive(self) -> None:
        """Start the server again if it has ended."""
        server = self._server
        if server is None:
            raise StoreUnavailable("the embedded PostgreSQL was closed here; open the app again")
        await server.revive()

    def _join(self, loop: asyncio.AbstractEventLoop) -> str:
        with self._lock:
            if self._server is None:
                directory = self._directory or find_directory(Path.cwd())
                self._server = EmbeddedServer.acquire(directory)
                self._found(directory)
            self._loops.add(loop)
            return self._server.url

    def _leave(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            self._loops = {other for other in self._loops - {loop} if not other.is_closed()}
            if not self._loops and self._server is not None:
                server, self._server = self._server, None
                server.release()
