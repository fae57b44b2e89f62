"""A PgBouncer of our own, and whether everything is to be tested behind one."""

import asyncio
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

import asyncpg
import pytest

from windlass.store.postgres import embedded_launch
from windlass.store.postgres.store import PostgresOptions

BEHIND_POOLER = os.environ.get("POSTGRES_TEST_POOLER") == "1"
SESSIONS = 2  # of the server, for everybody behind the pooler
SUITE_SESSIONS = 20  # of the server for each database, when everything is tested behind a pooler
PORT = 6543  # only the name of a socket in a folder of our own
DEADLINE = 20.0  # seconds until a test gives up on another process
# What 1.18 dies of when a client that asked to cancel leaves before that was passed on, as one does whose
# server is silent. Mended in 1.19.1; Debian 12 has 1.18.
KNOWN_END = "in function disconnect_client(): bad client state: 0"


def store_options(url: str, **options: Any) -> PostgresOptions:
    """Options for a store on a database that the tests may have put behind a pooler."""
    options.setdefault("pooler", BEHIND_POOLER)
    return PostgresOptions(url=url, **options)


def require_pgbouncer() -> str:
    search = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin"])
    program = shutil.which("pgbouncer", path=search)
    if program is None:
        reason = "NOTHING WAS TESTED BEHIND A POOLER: install the Debian package 'pgbouncer'"
        if os.environ.get("CI") == "true" or BEHIND_POOLER:
            pytest.fail(reason)
        pytest.skip(reason)
    return program


class Pooler:
    """A PgBouncer of our own before one server, for all of its databases."""

    def __init__(
        self,
        folder: Path,
        server_url: str,
        *,
        sessions: int = SESSIONS,  # for each database
        mode: str = "transaction",
        ignored: tuple[str, ...] = (),  # startup parameters
        also: Mapping[str, str] = MappingProxyType({}),  # settings that go before ours
    ) -> None:
        self.folder = folder
        self._also = also
        self._sessions, self._mode, self._ignored = sessions, mode, ignored
        self.log = folder / "pgbouncer.log"
        self.process: subprocess.Popen[bytes]
        self.killed: subprocess.Popen[bytes] | None = None
        self.failed = False  # it has ended, and nobody knows why
        self._starting = threading.Lock()
        self._is_stopped = False
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

    @classmethod
    @contextmanager
    def running(cls, server_url: str, **options: Any) -> Iterator["Pooler"]:
        program = require_pgbouncer()
        # Not tmp_path: its name is too long for a socket, and its parents are closed to others.
        with tempfile.TemporaryDirectory(prefix="windlass-pooler-") as folder:
            pooler = cls(Path(folder), server_url, **options)
            pooler.process = pooler.start(program)
            service = threading.Thread(target=pooler._serve, args=(program,))
            service.start()
            try:
                asyncio.run(pooler.wait(pooler.url(server_url)))
                yield pooler
                assert not pooler.failed, f"PgBouncer has ended: {pooler.log.read_text()}"
            finally:
                pooler._stop()
                service.join()

    def kill(self) -> None:
        """End it as a fault would; it is started again."""
        self.killed = self.process
        self.process.kill()

    def _serve(self, program: str) -> None:
        """Start it again when it has ended, as the service manager does that it has everywhere."""
        heard = 0  # of its log
        while True:
            self.process.wait()
            with self._starting:
                if self._is_stopped:
                    return
                said = self.log.read_text()[heard:]
                if self.process is not self.killed and KNOWN_END not in said:
                    self.failed = True
                    return
                heard += len(said)
                self.process = self.start(program)

    def _stop(self) -> None:
        with self._starting:
            self._is_stopped = True
            self.process.terminate()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:  # newer ones wait for their clients
            self.process.kill()
            self.process.wait()

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
        # Whoever sends a startup parameter that is not ignored is refused. Round robin: who comes
        # again is given another session if there is one, not the one it had. A server that was away
        # is tried again soon, and not after fifteen seconds.
        return f"""
[databases]
* = {server}

[pgbouncer]
listen_addr =
listen_port = {PORT}
unix_socket_dir = {self.folder}
logfile = {self.log}
auth_type = any
admin_users = {self._server["user"]}
ignore_startup_parameters = {", ".join(self._ignored)}
pool_mode = {self._mode}
default_pool_size = {self._sessions}
max_client_conn = 1000
server_round_robin = 1
server_reset_query =
server_login_retry = 1
""" + "".join(f"{name} = {value}\n" for name, value in self._also.items())

    async def close_sessions(self, database_url: str) -> None:
        """Wait until no transaction is under way, and close every session with the database.

        Its clients stay, and are given new ones. What a client had sent before it vanished has been
        passed on: that is older than the connection which this asks on.
        """
        name = urlsplit(database_url).path.removeprefix("/")
        console = await asyncpg.connect(self.url("postgresql:///pgbouncer"))
        try:
            await console.execute(f"PAUSE {name}")
            await console.execute(f"RESUME {name}")
        finally:
            await console.close()

    async def wait(self, url: str) -> None:
        """Return once it answers."""
        deadline = time.monotonic() + DEADLINE
        while True:
            try:
                connection = await asyncpg.connect(url, statement_cache_size=0)
            except (OSError, asyncpg.PostgresError):
                if self.failed or time.monotonic() > deadline:
                    pytest.fail(f"PgBouncer does not answer; it said\n{self.log.read_text()}")
                await asyncio.sleep(0.02)
            else:
                await connection.close()
                return
