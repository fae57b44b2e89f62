"""A PostgreSQL that a test has for itself."""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import asyncpg

from contract.pgbouncer import BEHIND_POOLER, SUITE_SESSIONS, Pooler
from faults.processes import until
from windlass.store.postgres.embedded import EmbeddedServer
from windlass.store.postgres.embedded_start import Place

# Of everybody else. The name of the application is not asked for: a pooler's sessions have none.
SESSIONS = """
SELECT pid FROM pg_stat_activity
WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()
"""


class Server:
    """A PostgreSQL that a test has for itself, to restart and to stop in its tracks."""

    def __init__(self, directory: Path, **settings: str) -> None:
        self._place = Place(directory)
        self._settings = {"fsync": "off", **settings}
        self._held: list[EmbeddedServer] = []
        self._acquire()
        self.url = self._held[0].url

    def _acquire(self) -> None:
        self._held.append(EmbeddedServer.acquire(self._place.directory, settings=self._settings))

    def restart(self, how: signal.Signals = signal.SIGINT) -> None:
        """Stop it (SIGINT: fast, SIGQUIT: immediate, SIGKILL) and start it again."""
        process = self._process()
        os.kill(process, how)
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
            rows = await connection.fetch(SESSIONS)
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

    @contextmanager
    def way(self) -> Iterator[str]:
        """Lend a URL for what is tested; the server's own is around the pooler, if there is one."""
        if not BEHIND_POOLER:
            yield self.url
            return
        with Pooler.running(self.url, sessions=SUITE_SESSIONS) as pooler:
            yield pooler.url(self.url)

    def release(self) -> None:
        for server in self._held:
            server.release()

    def _process(self) -> int:
        process = self._place.serving_process()
        assert process is not None
        return process
