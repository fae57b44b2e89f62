"""An embedded server that is killed while it is used: it is started again, and nothing is lost."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from acceptance.embedded_users import (
    FAST,
    environment,
    postmaster,
    processes_of,
    query,
    sessions_gone,
    wait_until,
)
from faults.noting import enqueue_in_the_end
from windlass import App
from windlass.model.errors import StoreUnavailable
from windlass.store.postgres import embedded
from windlass.store.postgres.embedded import EmbeddedServer, is_installed

pytestmark = [
    pytest.mark.skipif(not is_installed(), reason="needs the embedded extra"),
    pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="looks at processes in /proc"),
]
TASKS = 300
ENDED_WELL = "SELECT count(*) FROM windlass.tasks WHERE status = 'completed'"
SHOP = """
import asyncio
from windlass import App

app = App()

@app.task
async def note(n: int) -> None:
    with open("ran", "a") as ran:
        ran.write(f"{n}\\n")
    await asyncio.sleep(0.02)
"""
CLIENT = """
import asyncio, sys
from windlass import App, StoreUnavailable

async def enqueue(app):
    try:
        await app.enqueue("note", {"n": 1})
    except StoreUnavailable:  # of a session that has just ended
        await app.enqueue("note", {"n": 1})

async def main():
    async with App(sys.argv[1]) as app:
        await asyncio.gather(*(enqueue(app) for _ in range(8)))
        print("open", flush=True)
        for line in sys.stdin:
            done = await asyncio.gather(*(enqueue(app) for _ in range(8)))
            print(len(done), flush=True)

asyncio.run(main())
"""
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def directory(tmp_path: Path, with_data: Callable[[Path], Path]) -> Iterator[Path]:
    yield with_data(tmp_path / ".windlass")
    for process_id in processes_of(tmp_path / ".windlass"):  # of a test that failed half way
        os.kill(process_id, signal.SIGKILL)


@pytest.fixture
def start(tmp_path: Path, directory: Path) -> Iterator[Start]:
    """Start Python in the folder of the project, whose database is the embedded one."""
    (tmp_path / "shop.py").write_text(SHOP)
    # Longer than a start of the server takes, and short enough to wait for after a lost claim.
    variables = {"WINDLASS_LEASE": "10", "WINDLASS_HEARTBEAT": "2"}
    variables["WINDLASS_DATABASE_URL"] = f"embedded:{directory}"
    with (tmp_path / "said").open("a") as said, ExitStack() as processes:

        def start(*arguments: str) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=tmp_path,
                env=environment() | variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
            )
            processes.enter_context(process)
            processes.callback(process.kill)
            return process

        yield start


def heard(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def starts(directory: Path) -> int:
    return (directory / "postgres.log").read_text().count("starting PostgreSQL")


def end(directory: Path, request: signal.Signals) -> None:
    ending = set(processes_of(directory))
    os.kill(postmaster(directory), request)
    wait_until(lambda: ending.isdisjoint(processes_of(directory)))


@pytest.mark.parametrize("request_", [signal.SIGKILL, signal.SIGINT], ids=["killed", "stopped"])
async def test_a_server_that_ended_is_started_again_by_who_uses_it(
    directory: Path, request_: signal.Signals
) -> None:
    async with App(f"embedded:{directory}") as app:
        handle = await app.enqueue("note", {"n": 0})
        before = postmaster(directory)
        await asyncio.to_thread(end, directory, request_)

        await enqueue_in_the_end(app, 1)

        assert postmaster(directory) != before
        assert (await handle.get()).status == "pending"
    assert not processes_of(directory)


@pytest.mark.parametrize("victim", ["server", "backend"])
def test_a_worker_goes_on_when_a_process_of_its_server_is_killed(
    directory: Path, tmp_path: Path, start: Start, victim: str
) -> None:
    async def enqueue() -> None:
        async with App(f"embedded:{directory}") as app:
            for n in range(TASKS):
                await app.enqueue("note", {"n": n})

    def ran() -> list[str]:
        return (tmp_path / "ran").read_text().split() if (tmp_path / "ran").exists() else []

    asyncio.run(enqueue())
    worker = start("-m", "windlass.cli", "worker", "shop:app", "--concurrency", "4")
    for part in (1, 2):
        wait_until(lambda part=part: len(ran()) >= part * TASKS // 4)  # type: ignore[misc]
        os.kill(postmaster(directory) if victim == "server" else a_backend(directory), 9)
    wait_until(lambda: len(set(ran())) == TASKS)
    worker.send_signal(signal.SIGTERM)

    said = (tmp_path / "said").read_text()
    assert worker.wait(60) == 0, said
    assert Counter(ran()) == Counter(map(str, range(TASKS)))
    assert "Traceback" not in said
    assert ("server.restarted" in said) == (victim == "server")
    assert not processes_of(directory)
    server = EmbeddedServer.acquire(directory, settings=FAST)
    assert query(server.url, ENDED_WELL) == TASKS
    server.release()


def a_backend(directory: Path) -> int:
    """A process of the server in which a client's statements run."""
    for process_id in processes_of(directory):
        name = Path(f"/proc/{process_id}/cmdline").read_bytes()
        if name.startswith(b"postgres: windlass windlass"):
            return process_id
    pytest.fail("the worker has no connection")


def test_many_connections_that_find_out_at_once_start_one_server(
    directory: Path, start: Start
) -> None:
    clients = [start("-c", CLIENT, f"embedded:{directory}") for _ in range(4)]
    assert [heard(client) for client in clients] == ["open"] * 4
    end(directory, signal.SIGKILL)

    for client in clients:
        tell(client)

    assert [heard(client) for client in clients] == ["8"] * 4
    assert starts(directory) == 2
    for client in clients:
        client.communicate(timeout=90)
    assert not processes_of(directory)


async def test_a_server_that_cannot_be_started_again_says_why_until_it_can(directory: Path) -> None:
    async with App(f"embedded:{directory}") as app:
        await app.enqueue("note", {"n": 1})
        settings = directory / "data" / "postgresql.auto.conf"
        settings.write_text("work_mem = much\n")
        await asyncio.to_thread(end, directory, signal.SIGKILL)

        await sessions_gone(app)

        with pytest.raises(StoreUnavailable, match=r"(?s)ended at its start.*work_mem"):
            await asyncio.gather(*(app.enqueue("note", {"n": n}) for n in range(8)))
        settings.write_text("")
        await enqueue_in_the_end(app, 1)


async def test_attempts_to_start_it_again_do_not_follow_each_other_at_once(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = EmbeddedServer.acquire(directory, settings=FAST)
    monkeypatch.setattr(embedded, "backoff", lambda _: 3600.0)
    (directory / "data" / "postgresql.auto.conf").write_text("work_mem = much\n")
    await asyncio.to_thread(end, directory, signal.SIGKILL)

    for _ in range(3):
        with pytest.raises(StoreUnavailable, match="work_mem"):
            await server.revive()

    assert (directory / "postgres.log").read_text().count('"work_mem": "much"') == 1
    server.release()


async def test_who_has_left_does_not_start_it_again(directory: Path) -> None:
    server = EmbeddedServer.acquire(directory, settings=FAST)
    server.release()

    with pytest.raises(StoreUnavailable, match="closed here; open the app again"):
        await server.revive()

    assert not processes_of(directory)


async def test_a_release_during_a_revival_leaves_no_server_behind(directory: Path) -> None:
    server = EmbeddedServer.acquire(directory, settings=FAST)
    await asyncio.to_thread(end, directory, signal.SIGKILL)

    revival = asyncio.create_task(server.revive())
    await asyncio.to_thread(server.release)
    await asyncio.gather(revival, return_exceptions=True)

    assert not processes_of(directory)


def test_a_forked_child_does_not_start_it_for_its_parent(directory: Path) -> None:
    server = EmbeddedServer.acquire(directory, settings=FAST)
    end(directory, signal.SIGKILL)
    child = os.fork()
    if child == 0:
        try:
            asyncio.run(server.revive())
        except StoreUnavailable:
            os._exit(7)
        os._exit(0)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert not processes_of(directory)
    asyncio.run(server.revive())
    assert query(server.url, "SELECT 1") == 1
    server.release()


async def test_a_directory_that_was_deleted_is_named_and_not_made_again(directory: Path) -> None:
    app = App(f"embedded:{directory}")
    async with app:
        await app.enqueue("note", {"n": 1})
        await asyncio.to_thread(end, directory, signal.SIGKILL)
        shutil.rmtree(directory)
        await sessions_gone(app)

        with pytest.raises(StoreUnavailable, match=str(directory)):
            await app.enqueue("note", {"n": 1})

    assert not processes_of(directory)
    assert not await asyncio.to_thread(directory.exists)


def test_a_directory_made_anew_is_not_for_the_users_of_the_old_one(directory: Path) -> None:
    old = EmbeddedServer.acquire(directory, settings=FAST)
    end(directory, signal.SIGKILL)
    shutil.rmtree(directory)
    new = EmbeddedServer.acquire(directory, settings=FAST)

    with pytest.raises(StoreUnavailable, match="the directory was replaced"):
        asyncio.run(old.revive())
    old.release()

    assert query(new.url, "SELECT 1") == 1
    new.release()
    assert not processes_of(directory)


def test_a_long_path_keeps_its_socket_whatever_the_temporary_folder_of_who_restarts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / ("x" * 200)
    server = EmbeddedServer.acquire(directory, settings=FAST)
    end(directory, signal.SIGKILL)
    (tmp_path / "t").mkdir()
    monkeypatch.setattr("tempfile.tempdir", "/var/tmp")

    other = EmbeddedServer.acquire(directory, settings=FAST)

    assert other.url == server.url
    assert query(server.url, "SELECT 1") == 1
    server.release()
    other.release()
