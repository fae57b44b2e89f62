"""Apps on embedded servers in real processes: who holds the server, who finds it, and where."""

import asyncio
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from acceptance.embedded_users import environment, postmaster, processes_of
from acceptance.test_embedded_identities import python_as
from slowly import slowly
from windlass import App
from windlass.store.postgres.embedded import is_installed

pytestmark = [
    pytest.mark.skipif(not is_installed(), reason="needs the embedded extra"),
    pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="looks at processes in /proc"),
]
HOLDER = """
import asyncio, os, sys
from windlass import App

async def main():
    async with App(sys.argv[1]) as app:
        handle = await app.enqueue("work", {})
        print(handle.id, flush=True)
        await asyncio.to_thread(sys.stdin.readline)

asyncio.run(main())
"""
Hold = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder every user can reach, which pytest's own are not, for the servers of one test."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    for data in folder.rglob("data"):
        for process_id in processes_of(data.parent):  # of a test that failed half way
            os.kill(process_id, signal.SIGKILL)
    shutil.rmtree(folder)


@pytest.fixture
def directory(folder: Path, with_data: Callable[[Path], Path]) -> Path:
    return with_data(folder / ".windlass")


@pytest.fixture
def hold() -> Iterator[Hold]:
    """Start a process that opens the app, enqueues one task and holds the app until told."""
    holders: list[subprocess.Popen[str]] = []

    def hold(url: str, *, python: list[str] | None = None, cwd: Path | None = None) -> Holder:
        holder = subprocess.Popen(
            [*(python or [sys.executable]), "-c", HOLDER, url],
            cwd=cwd,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        holders.append(holder)
        return holder

    yield hold
    for holder in holders:
        if holder.returncode is None:
            holder.kill()
            holder.communicate(timeout=90)


Holder = subprocess.Popen[str]


def task_of(holder: Holder) -> str:
    assert holder.stdout is not None
    return holder.stdout.readline().strip()


def leave(holder: Holder) -> str:
    """Let it end; return what it said on standard error."""
    _, said = holder.communicate("\n", timeout=90)
    assert holder.returncode == 0, said
    return said


def kill(holder: Holder) -> None:
    holder.kill()
    holder.communicate(timeout=90)


async def status(url: str, task_id: str) -> str:
    async with App(url) as app:
        return str((await app.handle(task_id).get()).status)


def test_event_loops_that_open_an_app_at_once_hold_its_server_once(directory: Path) -> None:
    app = App(f"embedded:{directory}")
    together = threading.Barrier(4)

    async def use() -> None:
        together.wait()
        async with app:
            await app.enqueue("work", {})
            together.wait()

    threads = [threading.Thread(target=lambda: asyncio.run(use())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert not together.broken
    assert not processes_of(directory)


def test_an_app_that_opens_while_another_loop_closes_it_has_a_server(directory: Path) -> None:
    app = App(f"embedded:{directory}")
    together = threading.Barrier(2)
    failed: list[BaseException] = []

    async def use() -> None:
        for _ in range(5):
            together.wait()
            async with app:
                await app.enqueue("work", {})

    def run() -> None:
        try:
            asyncio.run(use())
        except BaseException as error:
            failed.append(error)
            together.abort()

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert not failed
    assert not processes_of(directory)


def test_after_the_kill_of_all_users_the_next_one_adopts_the_server(
    directory: Path, hold: Hold
) -> None:
    url = f"embedded:{directory}"
    holders = [hold(url) for _ in range(3)]
    tasks = [task_of(holder) for holder in holders]
    process_id = postmaster(directory)
    for holder in holders:
        kill(holder)

    next_one = hold(url)

    assert task_of(next_one)
    assert postmaster(directory) == process_id
    assert {asyncio.run(status(url, task)) for task in tasks} == {"pending"}
    leave(next_one)
    assert not processes_of(directory)


def test_the_kill_of_one_user_does_not_disturb_another(directory: Path, hold: Hold) -> None:
    url = f"embedded:{directory}"
    killed, other = hold(url), hold(url)
    task = task_of(killed)
    assert task_of(other)
    process_id = postmaster(directory)

    kill(killed)

    assert asyncio.run(status(url, task)) == "pending"
    assert postmaster(directory) == process_id
    leave(other)
    assert not processes_of(directory)


@pytest.mark.parametrize(
    "content",
    slowly(["", "garbage\n", f"{2**22 - 1}\n/elsewhere\n"], lambda content: "/" not in content),
)
def test_files_that_a_killed_server_left_behind_are_not_believed(
    directory: Path, hold: Hold, content: str
) -> None:
    user = hold(f"embedded:{directory}")
    task = task_of(user)
    os.kill(postmaster(directory), signal.SIGKILL)
    kill(user)
    for name in ("data/postmaster.pid", "socket/.s.PGSQL.5432.lock"):
        (directory / name).write_text(content)
    (directory / "socket" / ".s.PGSQL.5432").unlink(missing_ok=True)
    (directory / "socket" / ".s.PGSQL.5432").touch()

    assert asyncio.run(status(f"embedded:{directory}", task)) == "pending"
    assert not processes_of(directory)


async def test_two_apps_of_one_process_have_a_server_each(folder: Path) -> None:
    one = App(f"embedded:{folder}/one/.windlass")
    two = App(f"embedded:{folder}/two/.windlass")

    async with two:
        async with one:
            handle = await one.enqueue("work", {})
            assert [queue.name for queue in await (await two.store()).queues()] == []
        assert not processes_of(folder / "one" / ".windlass")
        await two.enqueue("work", {})
        async with one:
            assert (await handle.get()).status == "pending"
    assert not processes_of(folder / "two" / ".windlass")


async def test_two_apps_of_one_process_share_the_server_of_one_directory(directory: Path) -> None:
    one, two = (App(f"embedded:{directory}") for _ in range(2))

    async with two:
        async with one:
            handle = await one.enqueue("work", {})
        assert (await two.handle(handle.id).get()).status == "pending"
    assert not processes_of(directory)


@pytest.mark.parametrize("user", slowly(["ourselves", "nobody"], lambda user: user == "ourselves"))
def test_a_project_whose_path_has_spaces_is_found_from_below(
    folder: Path, hold: Hold, user: str
) -> None:
    project = folder / "my größtes project"
    (project / "a b" / "c").mkdir(parents=True)
    python = [sys.executable]
    if user == "nobody":
        if os.geteuid() != 0:
            pytest.skip("only root can become another user")
        nobody = pwd.getpwnam("nobody")
        python = python_as(nobody.pw_uid)
        os.chown(project, nobody.pw_uid, nobody.pw_gid)
    first = hold("embedded:", python=python, cwd=project)
    task = task_of(first)

    below = hold("embedded:", python=python, cwd=project / "a b" / "c")

    assert task_of(below)
    assert leave(first) == f"windlass: embedded PostgreSQL in {project}/.windlass\n"
    assert leave(below) == f"windlass: embedded PostgreSQL in {project}/.windlass\n"
    assert asyncio.run(status(f"embedded:{project}/.windlass", task)) == "pending"
    assert not processes_of(project / ".windlass")
