"""A PostgreSQL of our own: binaries from the `embedded` extra, kept alive by those who use it."""

import asyncio
import atexit
import contextlib
import fcntl
import os
import signal
import socket
import struct
import sys
import threading
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from windlass.model.errors import ConfigurationError, StoreUnavailable, WindlassError
from windlass.service import backoff
from windlass.store.postgres.embedded_start import (
    HOW_TO_INSTALL,
    SOCKET_NAME,
    Place,
    can_hold_socket,
    is_installed,
    start_server,
)
from windlass.telemetry import emit

__all__ = ["HOW_TO_INSTALL", "EmbeddedServer", "find_directory", "is_installed"]

_START_SECONDS = 60.0
_STOP_SECONDS = 30.0
_TURN_SECONDS = 120.0
_POLL_SECONDS = 0.01
_NO_SETTINGS: Mapping[str, str] = MappingProxyType({})


def find_directory(start: Path) -> Path:
    """Find the nearest `.windlass` from `start` upwards, as git does, else name one in `start`.

    One that belongs to a stranger is passed over: who owns the data decides which tasks we run.
    """
    start = start.resolve()
    trusted = {0, os.geteuid(), start.stat().st_uid}
    for folder in (start, *start.parents):
        directory = folder / ".windlass"
        with contextlib.suppress(OSError):  # a folder we may not look into holds none of ours
            if directory.is_dir() and directory.stat().st_uid in trusted:
                return directory
    return start / ".windlass"


class EmbeddedServer:
    """A PostgreSQL of our own in one directory: the first user starts it, the last one stops it."""

    directory: Path
    url: str

    def __init__(self, place: Place, users: int, settings: Mapping[str, str]) -> None:
        host = urllib.parse.quote(str(place.socket_folder), safe="")
        self.directory = place.directory
        # The port is spelled out because PGPORT in the environment would win otherwise.
        self.url = f"postgresql://windlass@/windlass?host={host}&port=5432"
        self._place = place
        self._users: int | None = users
        self._process_id = os.getpid()
        self._releasing = threading.Lock()
        self._settings = settings
        self._asking = threading.Lock()
        self._attempt: Future[str | None] | None = None  # its result: why it failed
        self._again_at = 0.0  # monotonic
        self._failures = 0  # to start it again, in a row
        atexit.register(self.release)

    @classmethod
    def acquire(
        cls, directory: Path, *, settings: Mapping[str, str] = _NO_SETTINGS
    ) -> "EmbeddedServer":
        """Start the server or join the one that runs; only the one who starts it sets `settings`.

        Blocks, for a minute at most unless others go first; each call wants its own release.
        """
        place = Place(directory.resolve())
        try:
            place.prepare()
            with _turn(place):
                users = place.open_file("users.lock")
                try:
                    # Never waits: leavers try for this lock only in their turn.
                    fcntl.flock(users, fcntl.LOCK_SH)
                    _ensure_running(place, settings)
                except StoreUnavailable:
                    os.close(users)  # it may still come up, for the next user
                    raise
                except BaseException:
                    _leave(place, users)
                    raise
                return cls(place, users, settings)
        except OSError as error:
            raise ConfigurationError(
                f"{place}: {error}; make that possible, choose another directory with "
                "embedded:/dir, or give a PostgreSQL URL"
            ) from error

    def release(self) -> None:
        """Leave; the last user stops the server and waits for its end. A second call is nothing."""
        with self._releasing:
            users, self._users = self._users, None
        if users is None:
            return
        atexit.unregister(self.release)
        # After a fork the hold is the parent's, and unlocking our copy would end it. Without the
        # directory there is nothing to lock, and the server ends by itself; one that was made in
        # its place is for its own users to stop.
        if os.getpid() != self._process_id or not _is_hold(self._place, users):
            os.close(users)
            return
        with _turn(self._place):
            _leave(self._place, users)

    async def revive(self) -> None:
        """Start the server again if it has ended, for a user who still holds it.

        Whoever asks meanwhile waits for the same attempt, in whatever event loop. After one that
        failed the next waits a little, and until then its reason is repeated.
        """
        with self._asking:
            attempt = self._attempt
            if attempt is None or (attempt.done() and time.monotonic() >= self._again_at):
                attempt = self._attempt = Future()
                attempt.set_running_or_notify_cancel()  # who stops waiting does not stop it
                # Not in a pool of threads: it may take a minute, and others wait for those.
                threading.Thread(
                    target=self._attempt_start, args=(attempt,), name="windlass-revive", daemon=True
                ).start()
        reason = await asyncio.wrap_future(attempt)
        if reason is not None:
            raise StoreUnavailable(reason)

    def _attempt_start(self, attempt: Future[str | None]) -> None:
        reason: str | None = "it could not be started again"
        try:
            reason = self._start_again()
        finally:
            if reason is None:
                self._failures, self._again_at = 0, 0.0
            else:
                self._failures += 1
                self._again_at = time.monotonic() + backoff(self._failures)
            attempt.set_result(reason)

    def _start_again(self) -> str | None:
        try:
            with _turn(self._place):
                # Looked at in our turn: who leaves has said so before its own.
                if self._users is None or os.getpid() != self._process_id:
                    return f"{self._place}: it was closed here; open the app again"
                if not _is_hold(self._place, self._users):
                    return f"{self._place}: the directory was replaced; open the app again"
                if _ensure_running(self._place, self._settings):
                    emit("server.restarted", directory=self.directory)
        except OSError as error:
            return f"{self._place}: it has ended and cannot be started again: {error}"
        except WindlassError as error:
            return str(error)
        return None


def _is_hold(place: Place, users: int) -> bool:
    """Whether this is the lock that users of the directory take now: it may have been replaced."""
    try:
        return os.path.samestat(os.fstat(users), (place.directory / "users.lock").stat())
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _turn(place: Place) -> Iterator[None]:
    lock = place.open_file("start.lock")
    try:
        deadline = time.monotonic() + _TURN_SECONDS
        while not _try_lock(lock):
            if time.monotonic() > deadline:
                raise StoreUnavailable(
                    f"{place}: others have been starting or stopping it for {_TURN_SECONDS:.0f} s; "
                    "try again, or end the process that holds start.lock"
                )
            time.sleep(_POLL_SECONDS)
        yield
    finally:
        _unlock(lock)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _unlock(descriptor: int) -> None:
    # Closing alone would not do: a process forked meanwhile has a copy of the descriptor.
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _is_alive(place: Place) -> bool:
    lock = place.open_file("server.lock")  # every process of the server holds it
    try:
        return not _try_lock(lock)
    finally:
        _unlock(lock)


def _ensure_running(place: Place, settings: Mapping[str, str]) -> bool:
    """Return whether it had to be started."""
    # One that is alive may be ready, starting, in recovery or on its way out: time will tell.
    is_running = _is_alive(place) and _becomes_ready(place)
    if not is_running:
        start_server(place, settings)
        if not _becomes_ready(place):
            raise ConfigurationError(f"{place}: the server ended at its start; {place.log_end()}")
    place.require_private_socket()
    return not is_running


def _becomes_ready(place: Place) -> bool:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        if _ask(place).is_ready:
            return True
        if not _is_alive(place):
            return False
        if time.monotonic() > deadline:
            raise StoreUnavailable(
                f"{place}: no answer on '{place.socket_folder}' for {_START_SECONDS:.0f} s; "
                f"try again, or read on: {place.log_end()}"
            )
        time.sleep(_POLL_SECONDS)


def _leave(place: Place, users: int) -> None:
    try:
        if _try_lock(users):
            _stop(place)
    finally:
        _unlock(users)


def _stop(place: Place) -> None:
    if not _is_alive(place):
        place.remove_socket_link()
        return
    process_id = _ask(place).process_id
    if process_id is None:
        process_id = place.serving_process()
    if process_id == 0:
        return  # it runs in another container: for its own users to stop
    for request in (signal.SIGINT, signal.SIGQUIT):  # fast shutdown, then immediate
        if process_id is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_id, request)
        if _ends(place):
            break
    else:
        raise StoreUnavailable(
            f"{place}: process {process_id} does not stop; end it by hand; {place.log_end()}"
        )
    place.remove_socket_link()
    if process_id is not None:
        with contextlib.suppress(ChildProcessError):  # as process 1 of a container we inherit it
            os.waitpid(process_id, os.WNOHANG)


def _ends(place: Place) -> bool:
    deadline = time.monotonic() + _STOP_SECONDS
    while _is_alive(place):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


@dataclass(frozen=True)
class _Answer:
    is_ready: bool
    process_id: int | None  # of the listener; 0 if it cannot be seen from here


def _ask(place: Place) -> _Answer:
    process_id = None
    if not can_hold_socket(place.socket_folder):
        return _Answer(is_ready=False, process_id=None)  # nor has any server been started yet
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(5)
        try:
            connection.connect(str(place.socket_folder / SOCKET_NAME))
            process_id = _listener(connection)
            return _Answer(_greets(connection), process_id)
        except (ConnectionError, FileNotFoundError, TimeoutError):
            return _Answer(is_ready=False, process_id=process_id)


def _listener(connection: socket.socket) -> int:
    # Asked from the kernel: a number from postmaster.pid may have been given to another process
    # since, or mean another process in this container.
    if sys.platform == "linux":
        answer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    else:
        answer = connection.getsockopt(0, 2, 4)  # LOCAL_PEERPID of macOS
    return int(struct.unpack_from("i", answer)[0])


def _greets(connection: socket.socket) -> bool:
    body = struct.pack("!i", 3 << 16) + b"user\0windlass\0database\0windlass\0\0"
    connection.sendall(struct.pack("!i", len(body) + 4) + body)
    with connection.makefile("rb") as stream:
        while len(head := stream.read(5)) == 5:
            body = stream.read(struct.unpack("!i", head[1:])[0] - 4)
            if head[:1] == b"Z":
                connection.sendall(b"X\0\0\0\4")
                return True
            if head[:1] == b"E":  # 57P03: starting, in recovery or stopping; else it is up
                return b"\0C57P03\0" not in body
    return False
