"""An app opens when it is used and closes when nobody is left, in every loop, thread and process."""

import asyncio
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import asyncpg
import pytest

import windlass
from acceptance.quick import QUICK
from windlass import App, ConfigurationError
from windlass.store.postgres.embedded import is_installed

FORKING = """
import asyncio, gc, os, signal, sys
import uvloop
from windlass import App

app = App(sys.argv[1])
app.enqueue_sync("work", {})
uvloop.run(app.enqueue("work", {}))  # whose sockets are closed by now, and not the connections
if not os.fork():
    del app  # a child that has no use for it
    gc.collect()
    sys.exit()
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
opened, parent_left = os.pipe(), os.pipe()
if os.fork():
    os.close(opened[1])
    assert os.read(opened[0], 1) == b"x", "the child has failed"
    app.enqueue_sync("work", {})
    app.close_sync()
    os.write(parent_left[1], b"x")
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
signal.alarm(30)  # a child that hangs must not stay behind
app.enqueue_sync("work", {})
os.write(opened[1], b"x")
os.read(parent_left[0], 1)
asyncio.run(app.enqueue("work", {}))

async def count():
    (queue,) = await (await app.store()).queues()
    return sum(queue.counts.values())

assert app.run_sync("count", count) == 5
app.close_sync()
"""


ABANDONING = """
import asyncio, sys
from pathlib import Path
from windlass import App

app = App("embedded:" + sys.argv[1])
app.enqueue_sync("work", {})
asyncio.run(app.enqueue("work", {}))
app.close_sync()
assert not Path(sys.argv[1], "data", "postmaster.pid").exists(), "the server is still there"
"""


def run(script: str, argument: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", script, argument],
        env=os.environ | {"PYTHONPATH": str(Path(windlass.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


async def test_an_app_stays_open_until_its_last_block_ends(app: App) -> None:
    waiting = asyncio.create_task((await app.enqueue("later", {})).result())
    await asyncio.sleep(0)

    async with app.worker():
        pass
    await asyncio.wait([waiting], timeout=0.1)

    assert not waiting.done()
    waiting.cancel()


async def test_a_block_that_ends_closes_nothing_that_a_call_of_another_is_at(app_url: str) -> None:
    app = App(app_url, **QUICK)
    finish = asyncio.Event()

    @app.task
    async def work() -> str:
        await finish.wait()
        return "done"

    async with app:
        handle = await work.enqueue()
        waiting = asyncio.create_task(handle.result(timeout=20))
        await asyncio.sleep(0)
    assert app._database._opened  # by whoever waits
    finish.set()
    await app.run_worker(until_idle=True)

    assert await waiting == "done"
    assert not app._database._opened


async def test_who_waits_for_a_result_is_told_when_the_app_is_closed(app: App) -> None:
    waiting = asyncio.create_task((await app.enqueue("later", {})).result())
    await asyncio.sleep(0)

    await app.close()

    with pytest.raises(ConfigurationError, match="closed"):
        await asyncio.wait_for(waiting, 10)
    assert (await app.enqueue("later", {})).created  # a later call opens it again


async def test_calls_that_come_at_once_open_an_app_once(app_url: str) -> None:
    app = App(app_url, **QUICK)

    clients = await asyncio.gather(*(app.client() for _ in range(5)))

    assert len(set(clients)) == 1
    await app.close()


@pytest.mark.needs_direct("sessions of a pooler outlive their clients")
async def test_a_closed_app_leaves_no_session_behind(database_url: str, sql_url: str) -> None:
    async with App(database_url) as app:
        await app.enqueue("work", {})
        await app.run_worker(until_idle=True)

    watcher = await asyncpg.connect(sql_url)
    sessions = """
        SELECT count(*) FROM pg_stat_activity
        WHERE datname = current_database() AND pid <> pg_backend_pid()
    """
    async with asyncio.timeout(10):  # the server takes a moment to notice
        while await watcher.fetchval(sessions):
            await asyncio.sleep(0.01)
    await watcher.close()


def test_an_app_serves_loop_after_loop_and_thread_beside_thread(app_url: str) -> None:
    app = App(app_url, **QUICK)

    async def enqueue(name: str) -> str:
        async with app:
            return (await app.enqueue(name, {})).id

    def count(task_ids: list[str]) -> int:
        return sum(app.handle(one).get_sync().status == "pending" for one in task_ids)

    one_after_another = [asyncio.run(enqueue("work")) for _ in range(3)]
    with ThreadPoolExecutor(4) as threads:
        beside = list(threads.map(lambda _: asyncio.run(enqueue("work")), range(4)))
        beside += [one.id for one in threads.map(lambda _: app.enqueue_sync("work", {}), range(4))]

    assert count(one_after_another + beside) == 11
    app.close_sync()


def test_an_app_forgets_the_loops_that_have_ended() -> None:
    app = App("memory:")

    async def enqueue() -> None:
        async with app:
            await app.enqueue("work", {})

    for _ in range(3):
        asyncio.run(enqueue())
        asyncio.run(app.enqueue("work", {}))

    assert len(app._database._opened) == len(app._database._opening) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(
    "place",
    [
        "postgres",
        pytest.param(
            "embedded",
            marks=pytest.mark.skipif(not is_installed(), reason="needs the embedded extra"),
        ),
    ],
)
def test_an_app_opens_anew_after_a_fork(
    place: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = f"embedded:{tmp_path}" if place == "embedded" else request.getfixturevalue("database_url")

    run(FORKING, url)


@pytest.mark.skipif(not is_installed(), reason="needs the embedded extra")
def test_the_embedded_server_runs_while_any_loop_has_the_app_open(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    app = App(f"embedded:{directory}")
    lock = directory / "data" / "postmaster.pid"  # there as long as the server runs

    async def open_beside() -> None:
        async with app:
            await asyncio.to_thread(asyncio.run, enqueue())
            assert lock.exists()
            assert (await app.enqueue("work", {})).created

    async def enqueue() -> None:
        async with app:
            await app.enqueue("work", {})

    asyncio.run(open_beside())

    assert not lock.exists()


@pytest.mark.skipif(not is_installed(), reason="needs the embedded extra")
def test_a_loop_that_ended_without_closing_the_app_does_not_keep_the_server(
    tmp_path: Path,
) -> None:
    run(ABANDONING, str(tmp_path / "data"))
