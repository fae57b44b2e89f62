"""A PgBouncer in transaction mode of our own."""

import asyncio
import os
import pwd
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import parse_qs, quote, unquote, urlsplit

import asyncpg
import pytest

from windlass.store.postgres import embedded_launch

SESSIONS = 2  # of the server, for everybody behind the pooler
PORT = 6543  # only the name of a socket in a folder of our own
DEADLINE = 20.0  # seconds until a test gives up on another process


class Pooler:
    """A PgBouncer of our own before one server, for all of its databases."""

    def __init__(self, folder: Path, server_url: str) -> None:
        self.folder = folder
        self.log = folder / "pgbouncer.log"
        parts = urlsplit(server_url)
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        self._server = {
            "host": query.get("host") or parts.hostname or "127.0.0.1",
            "port": query.get("port") or str(parts.port or 5432),
            "user": query.get("user") or unquote(parts.username or "postgres"),
        }
        if parts.password:
            self._server["password"] = unquote(parts.password)

    def url(self, database_url: str) -> str:
        """The same database, through the pooler."""
        host, user = quote(str(self.folder), safe=""), quote(self._server["user"], safe="")
        return f"postgresql://{user}@{urlsplit(database_url).path}?host={host}&port={PORT}"

    def start(self, program: str) -> subprocess.Popen[bytes]:
        identity, uid, gid = self._identity()
        settings = self.folder / "pgbouncer.ini"
        settings.write_text(self._settings())
        for path in (self.folder, settings, self.folder / "server.lock", self.log):
            path.touch()
            if identity == "account":
                os.chown(path, uid, gid)
        # PgBouncer refuses to run as root, and so does PostgreSQL.
        launch = [sys.executable, "-I", "-S", embedded_launch.__file__]
        who = [identity, str(uid), str(gid), "stay", str(self.folder)]
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [*launch, *who, program, "--quiet", str(settings)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _identity(self) -> tuple[str, int, int]:
        if os.geteuid() != 0:
            return "self", os.geteuid(), os.getegid()
        if not self._server["host"].startswith("/"):
            nobody = pwd.getpwnam("nobody")
            return "account", nobody.pw_uid, nobody.pw_gid
        # The folder of the server's socket may be closed to all but its owner.
        owner = Path(self._server["host"]).stat()
        if owner.st_uid != 0:
            return "account", owner.st_uid, owner.st_gid
        daemon = pwd.getpwnam("daemon")
        return "namespace", daemon.pw_uid, daemon.pw_gid

    def _settings(self) -> str:
        server = " ".join(
            "{}='{}'".format(name, value.replace("'", "''")) for name, value in self._server.items()
        )
        # No ignore_startup_parameters: whoever sends one is refused. Round robin: who comes again
        # is given another session if there is one, not the one it had.
        return f"""
[databases]
* = {server}

[pgbouncer]
listen_addr =
listen_port = {PORT}
unix_socket_dir = {self.folder}
logfile = {self.log}
auth_type = any
pool_mode = transaction
default_pool_size = {SESSIONS}
server_round_robin = 1
server_reset_query =
"""

    async def wait(self, process: subprocess.Popen[bytes], url: str) -> None:
        """Return once it answers."""
        deadline = time.monotonic() + DEADLINE
        while True:
            try:
                connection = await asyncpg.connect(url, statement_cache_size=0)
            except (OSError, asyncpg.PostgresError):
                if process.poll() is not None or time.monotonic() > deadline:
                    pytest.fail(f"PgBouncer does not answer; it said\n{self.log.read_text()}")
                await asyncio.sleep(0.02)
            else:
                await connection.close()
                return
