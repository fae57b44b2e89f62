"""Probes of a worker: they look at real things, and are told to nobody who has not asked."""

import asyncio
import json
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NamedTuple

import asyncpg
import pytest

from acceptance.probes import fetch
from acceptance.quick import QUICK
from faults.processes import until
from windlass import App, ConfigurationError, StoreUnavailable
from windlass.runtime import fetcher, health, heartbeat, monitor, reporter
from windlass.runtime import worker as worker_module

WITHIN = 30.0  # seconds


class Answer(NamedTuple):
    status: int
    checks: dict[str, str]


@pytest.fixture
async def app(app_url: str, port: int) -> AsyncIterator[App]:
    async with App(app_url, **QUICK, health_port=port) as app:
        yield app


@pytest.fixture
def ask(port: int) -> Callable[[str], Any]:
    async def ask(path: str) -> Answer:
        status, body = await asyncio.to_thread(fetch, port, path)
        return Answer(status, json.loads(body)["checks"])

    return ask


async def until_answered(ask: Any, status: int) -> Answer:
    answer: Answer = await ask("/readyz")
    async with asyncio.timeout(WITHIN):
        while answer.status != status:
            answer = await ask("/readyz")
    return answer


async def test_a_worker_that_works_is_alive_and_ready(app: App, ask: Any) -> None:
    async with app.worker():
        alive, ready = await ask("/livez"), await ask("/readyz")

    assert alive == (200, {"event loop": "ok", "heart": "ok"})
    assert ready.status == 200
    assert set(ready.checks) == {
        *("worker", "event loop", "heart", "claims", "wake-ups", "store"),
    }
    assert set(ready.checks.values()) == {"ok"}


async def test_a_worker_that_has_not_started_is_not_ready(app: App, ask: Any) -> None:
    starting, go_on = asyncio.Event(), asyncio.Event()

    @app.on_startup
    async def prepare() -> None:
        starting.set()
        await go_on.wait()

    running = asyncio.create_task(app.run_worker(until_idle=True))
    await starting.wait()
    assert (await ask("/readyz")).checks["worker"] == "starting"
    assert (await ask("/livez")).status == 200
    go_on.set()
    await running


async def test_a_worker_that_is_asked_to_stop_is_not_ready_from_that_moment(
    app: App, ask: Any
) -> None:
    started, finish = asyncio.Event(), asyncio.Event()

    @app.task
    async def work() -> None:
        started.set()
        await finish.wait()

    async with app.worker() as worker:
        await work.enqueue()
        await started.wait()
        worker.stop()
        ready = await ask("/readyz")
        assert (ready.status, ready.checks["worker"]) == (503, "stopping")
        assert (await ask("/livez")).status == 200
        finish.set()


async def test_a_worker_that_is_asked_to_stop_while_it_is_looked_at_is_not_ready(
    app: App, ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    looking, go_on = asyncio.Event(), asyncio.Event()

    async def look() -> None:
        looking.set()
        await go_on.wait()

    monkeypatch.setattr(await app.store(), "check", look)
    async with app.worker() as worker:
        asking = asyncio.create_task(ask("/readyz"))
        await looking.wait()
        worker.stop()
        go_on.set()
        ready = await asking

    assert (ready.status, ready.checks["worker"]) == (503, "stopping")


async def test_a_worker_that_has_failed_is_not_ready_while_it_drains(
    app: App, ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, fail, finish = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def report(*_: object) -> None:
        await fail.wait()
        raise RuntimeError("broken")

    @app.task
    async def work() -> None:
        started.set()
        await finish.wait()

    monkeypatch.setattr(reporter.Reporter, "run", report)
    await work.enqueue()
    running = asyncio.create_task(app.run_worker())
    await started.wait()
    fail.set()
    await until_answered(ask, 503)  # it may have failed while that question was under way
    ready = await ask("/readyz")
    finish.set()
    with pytest.raises(RuntimeError, match="broken"):
        await running

    assert ready == (503, {"worker": "stopping", "event loop": "ok"})


async def test_a_look_that_fails_in_an_unknown_way_is_told(
    app: App, ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def look() -> None:
        raise asyncpg.UndefinedTableError("there is no such table")

    monkeypatch.setattr(await app.store(), "check", look)
    async with app.worker():
        ready = await ask("/readyz")

    assert ready.status == 503
    assert ready.checks["store"] == "UndefinedTableError: there is no such table"


async def test_an_event_loop_that_does_not_turn_is_told(
    app: App, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "STUCK_AFTER", 0.5)
    told: list[tuple[int, bytes]] = []

    @app.task
    async def block() -> None:
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor() as pool:
            time.sleep(1)
            told.append(pool.submit(fetch, port, "/livez").result())
            told.append(pool.submit(fetch, port, "/readyz").result())

    await block.enqueue()
    await app.run_worker(until_idle=True)

    assert [status for status, _ in told] == [503, 503]
    assert all(b"has not turned for 1 s" in body for _, body in told)


async def test_other_pages_and_verbs_are_refused(app: App, port: int) -> None:
    async with app.worker():
        status, body = await asyncio.to_thread(fetch, port, "/etc/passwd")
        assert (status, body) == (404, b"there are: /livez, /metrics, /readyz\n")
        assert (await asyncio.to_thread(fetch, port, "/livez?x=1"))[0] == 200
        assert await asyncio.to_thread(fetch, port, "/livez", "HEAD") == (200, b"")
        assert (await asyncio.to_thread(fetch, port, "/livez", "POST"))[0] == 501


async def test_a_port_that_is_taken_is_named(app: App, port: int) -> None:
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(ConfigurationError, match=f"health_port {port} on 127.0.0.1 cannot be"),
    ):
        await app.run_worker(until_idle=True)


async def test_nothing_listens_unless_told_to(app_url: str) -> None:
    before = set(_listening())
    async with App(app_url, **QUICK) as app, app.worker():
        assert set(_listening()) - before == set()


def _listening() -> list[str]:
    lines = Path("/proc/self/net/tcp").read_text().splitlines()[1:]
    own = {link.readlink().name for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}
    sockets = (line.split() for line in lines)
    return [words[1] for words in sockets if words[3] == "0A" and f"socket:[{words[9]}]" in own]


async def test_a_schema_that_is_newer_leaves_a_worker_ready_and_one_that_lacks_something_does_not(
    database_url: str, port: int, ask: Any, sql_url: str
) -> None:
    connection = await asyncpg.connect(sql_url)
    async with App(database_url, **QUICK, health_port=port) as app, app.worker():
        await connection.execute("INSERT INTO windlass.migration VALUES (9999, 'later')")
        newer = await ask("/readyz")
        await connection.execute("DELETE FROM windlass.migration WHERE number = 3")
        lacking = await ask("/readyz")
    await connection.close()

    assert (newer.status, newer.checks["store"]) == (200, "ok")
    assert lacking.status == 503
    assert "lacks migration 0003" in lacking.checks["store"]


async def test_probes_are_answered_on_ipv6_too(app_url: str, port: int) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("NO PROBE WAS ASKED OVER IPv6: this host has none")
    async with App(app_url, **QUICK, health_host="::1", health_port=port) as app, app.worker():
        request = f"http://[::1]:{port}/livez"
        status = await asyncio.to_thread(lambda: urllib.request.urlopen(request).status)

    assert status == 200


# Whether it works


async def test_a_worker_whose_claims_are_not_answered_is_alive_but_not_ready(
    database_url: str, port: int, ask: Any, sql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetcher, "STUCK_AFTER", 0.3)
    connection = await asyncpg.connect(sql_url)
    async with App(database_url, **QUICK, health_port=port) as app, app.worker():
        async with connection.transaction():
            await connection.execute("LOCK TABLE windlass.ready IN ACCESS EXCLUSIVE MODE")
            ready = await until_answered(ask, 503)
            alive = await ask("/livez")
        await until_answered(ask, 200)
    await connection.close()

    assert "no look for work was answered for" in ready.checks["claims"]
    assert alive.status == 200


async def test_a_worker_that_cannot_keep_its_leases_is_alive_but_not_ready(
    app: App, ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise StoreUnavailable("no connection to spare")

    async with app.worker():
        with monkeypatch.context() as broken:
            broken.setattr(heartbeat.Heartbeat, "_beat", fail)
            ready = await until_answered(ask, 503)
            alive = await ask("/livez")
        await until_answered(ask, 200)

    assert "has kept no lease for" in ready.checks["heart"]
    assert alive.status == 200


async def test_a_worker_without_a_heart_is_neither_alive_nor_ready(app: App, ask: Any) -> None:
    async with app.worker() as worker:
        assert worker._beating_heart is not None
        await worker._beating_heart.stop()
        alive, ready = await ask("/livez"), await ask("/readyz")

    assert (alive.status, alive.checks["heart"]) == (503, "has stopped")
    assert (ready.status, ready.checks["heart"]) == (503, "has stopped")


async def test_a_worker_that_is_not_woken_is_not_ready(app: App, ask: Any) -> None:
    class Broken:
        trouble = "the session that listened was ended"

    async with app.worker() as worker, asyncio.timeout(20):
        while worker._listening is None:
            await asyncio.sleep(0.01)
        worker._listening = Broken()
        ready = await ask("/readyz")

    assert (ready.status, ready.checks["wake-ups"]) == (503, Broken.trouble)


async def test_all_who_ask_at_once_are_answered_by_one_look(
    app: App, ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, go_on = 0, asyncio.Event()

    async def look() -> None:
        nonlocal looks
        looks += 1
        await go_on.wait()

    monkeypatch.setattr(await app.store(), "check", look)
    async with app.worker():
        asking = [asyncio.create_task(ask("/readyz")) for _ in range(5)]
        while _requests() < len(asking):
            await asyncio.sleep(0.01)
        # Each has its thread: let the event loop hear of all of them.
        await ask("/livez")
        go_on.set()
        answers = await asyncio.gather(*asking)

    assert [answer.status for answer in answers] == [200] * 5
    assert looks == 1


async def test_a_look_that_hangs_is_given_up(
    app: App, ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "ANSWER_WITHIN", 0.1)
    given_up = asyncio.Event()

    async def look() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            given_up.set()

    monkeypatch.setattr(await app.store(), "check", look)
    async with app.worker():
        ready = await ask("/readyz")
        async with asyncio.timeout(10):
            await given_up.wait()

    assert (ready.status, ready.checks["store"]) == (503, "the store gave no answer within 0.1 s")


# Whoever asks


async def test_a_client_that_says_nothing_is_not_waited_for(
    app: App, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "SILENT_AT_MOST", 0.1)

    async with app.worker():
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /livez")
        async with asyncio.timeout(10):
            assert await reader.read() == b""
        writer.close()


async def test_a_client_that_goes_away_leaves_nothing_in_the_log(
    app: App, port: int, capfd: pytest.CaptureFixture[str]
) -> None:
    async with app.worker():
        client = socket.create_connection(("127.0.0.1", port))
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.send(b"GET /livez")
        await asyncio.to_thread(until, lambda: _requests() == 1)
        client.close()  # by a reset
        await asyncio.to_thread(until, lambda: _requests() == 0)

    assert "Traceback" not in capfd.readouterr().err


def _requests() -> int:
    return sum("process_request" in thread.name for thread in threading.enumerate())


def test_a_worker_that_waits_for_its_database_is_alive_and_not_ready(
    tmp_path: Path, port: int
) -> None:
    (tmp_path / "waiting.py").write_text(
        "from windlass import App\n"
        f"app = App('postgresql://nobody@127.0.0.1:1/none', health_port={port})\n"
    )
    with (tmp_path / "log").open("w+") as log:
        worker = subprocess.Popen(
            [sys.executable, "-m", "windlass.cli", "worker", "waiting:app"],
            cwd=tmp_path,
            stderr=log,
        )
        try:
            until(lambda: "store.unavailable" in (tmp_path / "log").read_text())
            alive, ready = fetch(port, "/livez"), fetch(port, "/readyz")
            measured, _ = fetch(port, "/metrics")
            worker.terminate()
            assert worker.wait(30) == 0
        finally:
            worker.kill()
            worker.wait()

    assert (alive[0], ready[0], measured) == (200, 503, 503)
    assert json.loads(ready[1])["checks"] == {"worker": "starting"}
