"""An embedded server on a disk that is full: it says so, keeps what it has, and comes back."""

import asyncio
import os
import secrets
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import asyncpg
import pytest

from acceptance.embedded_users import processes_of, sessions_gone
from faults.disk import SmallDisk, small_disk
from faults.noting import enqueue_in_the_end, noting_worker
from faults.processes import until
from windlass import App, ConfigurationError, StoreUnavailable
from windlass.store.postgres.embedded import is_installed
from windlass.store.postgres.store import PostgresStore

pytestmark = [
    pytest.mark.skipif(not is_installed(), reason="needs the embedded extra"),
    pytest.mark.needs_direct("an embedded server has no pooler before it"),
]
LEASE = {"lease": 10, "heartbeat": 2}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", 120) as disk:
        yield disk
        for process_id in processes_of(disk.folder / ".windlass"):  # of a test that failed
            os.kill(process_id, signal.SIGKILL)
        until(lambda: not processes_of(disk.folder / ".windlass"))


@pytest.fixture
def directory(disk: SmallDisk, with_data: Callable[[Path], Path]) -> Path:
    return with_data(disk.folder / ".windlass")


async def url_of(app: App) -> str:
    store = await app.store()
    assert isinstance(store, PostgresStore)
    return store._options.url


async def use_up_wal(connection: asyncpg.Connection) -> None:
    """Make the server need room for its log of changes, which it cannot do without."""
    try:
        while True:
            await connection.execute("SELECT pg_logical_emit_message(false, 'a', 'b')")
            await connection.execute("SELECT pg_switch_wal()")
    except asyncpg.ConnectionDoesNotExistError:
        return
    finally:
        connection.terminate()


async def enqueue_until_refused(app: App) -> list[int]:
    """Return the numbers of the tasks that were acknowledged before."""
    acknowledged: list[int] = []

    async def enqueue_many() -> None:
        for n in range(1, 2000):
            await app.enqueue("note", {"n": n, "ballast": secrets.token_hex(20_000)})
            acknowledged.append(n)

    with pytest.raises(StoreUnavailable, match="No space left on device"):
        await enqueue_many()
    return acknowledged


@pytest.mark.parametrize("megabytes", [0, 8])
async def test_a_disk_too_full_for_a_first_start_is_named_and_the_next_start_is_clean(
    disk: SmallDisk, megabytes: int
) -> None:
    directory = disk.folder / ".windlass"
    if megabytes:
        disk.resize(megabytes)
    else:
        disk.fill()

    with pytest.raises(ConfigurationError, match="No space left on device"):
        await App(f"embedded:{directory}").enqueue("note", {"n": 1})
    assert not list(directory.glob("data*"))
    disk.resize(120)
    disk.empty()

    async with App(f"embedded:{directory}") as app:
        await app.enqueue("note", {"n": 1})


async def test_a_start_on_a_full_disk_is_refused_with_the_room_that_is_left(
    disk: SmallDisk, directory: Path
) -> None:
    app = App(f"embedded:{directory}")
    disk.fill()

    with pytest.raises(ConfigurationError, match=r"No space left|disk has [\d,]+ bytes left"):
        await app.enqueue("note", {"n": 1})
    disk.empty()

    await app.enqueue("note", {"n": 1})
    await app.close()


async def test_a_full_disk_refuses_tasks_and_what_was_acknowledged_runs_once(
    disk: SmallDisk, directory: Path, tmp_path: Path
) -> None:
    async with App(f"embedded:{directory}") as app:
        with noting_worker(tmp_path, f"embedded:{directory}", **LEASE) as worker:
            await app.enqueue("note", {"n": 0})
            await asyncio.to_thread(until, lambda: worker.ran() == [0])
            disk.fill()
            acknowledged = await enqueue_until_refused(app)
            disk.empty()
            await enqueue_in_the_end(app, 5000)
            acknowledged += [0, 5000]

            await asyncio.to_thread(until, lambda: len(worker.ran()) >= len(acknowledged))
            await asyncio.to_thread(worker.drain)

    assert Counter(worker.ran()) == Counter(acknowledged)


async def test_a_server_that_a_full_disk_ended_comes_back_with_the_room(
    disk: SmallDisk, directory: Path, tmp_path: Path
) -> None:
    async with App(f"embedded:{directory}") as app:
        for n in range(100):
            await app.enqueue("note", {"n": n})
        with noting_worker(tmp_path, f"embedded:{directory}", concurrency=1, **LEASE) as worker:
            await asyncio.to_thread(until, lambda: len(worker.ran()) > 10)
            # A new session may need room to begin.
            connection = await asyncpg.connect(await url_of(app))
            disk.fill()
            await use_up_wal(connection)
            await asyncio.to_thread(until, lambda: "ended at its start" in worker.said())
            await sessions_gone(app)
            with pytest.raises(StoreUnavailable, match=r"disk has [\d,]+ bytes left"):
                await app.enqueue("note", {"n": 1000})
            disk.empty()

            await asyncio.to_thread(until, lambda: len(worker.ran()) >= 100)
            await enqueue_in_the_end(app, 100)
            await asyncio.to_thread(until, lambda: 100 in worker.ran())
            await asyncio.to_thread(worker.drain)

    assert Counter(worker.ran()) == Counter(range(101))
