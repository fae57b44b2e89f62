"""Wrong clocks: only the database's decides, and when that one jumps it is noticed."""

import asyncio
import os
from pathlib import Path

import pytest

from acceptance.quick import QUICK
from faults.conftest import Start
from faults.looking import LEFT, run
from faults.processes import until
from faults.servers import Server
from windlass import App

TIMES = """
SELECT
    status::text, attempts, created_at <= claimed_at AND claimed_at <= started_at
    AND started_at <= completed_at AND completed_at <= clock_timestamp() AS in_order
FROM windlass.tasks
"""
SEAT_OF_SOMEBODY_LOST = """
UPDATE windlass.leadership
SET holder = gen_random_uuid(), expires_at = clock_timestamp() + interval '1 minute'
"""
BEATEN = "SELECT heartbeat_at FROM windlass.worker_pulse"
KEPT = """
SELECT FROM windlass.claim
WHERE claimed_at < clock_timestamp() - interval '4 minutes' AND expires_at > clock_timestamp()
"""
LASTING = "SELECT FROM windlass.claim WHERE expires_at > clock_timestamp()"


@pytest.fixture(scope="session")
def libfaketime() -> str:
    found = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)
    if found is None:
        reason = "NO CLOCK WAS SET WRONG: install the Debian package 'faketime'"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return str(found)


@pytest.fixture
def set_clock(libfaketime: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Processes that begin now read their clock's offset from this file; monotonic time is real."""
    offset = tmp_path / "offset"
    offset.write_text("+0")
    monkeypatch.setenv("LD_PRELOAD", libfaketime)
    monkeypatch.setenv("FAKETIME_TIMESTAMP_FILE", str(offset))
    monkeypatch.setenv("FAKETIME_NO_CACHE", "1")
    monkeypatch.setenv("FAKETIME_DONT_FAKE_MONOTONIC", "1")
    return offset


async def enqueue(url: str) -> None:
    async with App(url) as app:
        await app.enqueue("across", {"n": 1}, max_attempts=10)
        await app.enqueue("short", {"n": 1})
        await app.enqueue("short", {"n": 2}, delay=0.5)


@pytest.mark.parametrize("offset", ["+1d", "-1d"])
def test_a_worker_whose_clock_is_wrong_works_as_any_other(
    database_url: str, sql_url: str, start: Start, tmp_path: Path, set_clock: Path, offset: str
) -> None:
    asyncio.run(enqueue(database_url))
    set_clock.write_text(offset)
    worker = start(settings={**QUICK, "lease": 20, "heartbeat": 1})
    until((tmp_path / "ledger").exists)
    set_clock.write_text("-3600" if offset == "+1d" else "+3600")  # it is set while a lease is held
    until(lambda: run(sql_url, "SELECT FROM windlass.running") != [])
    (tmp_path / "across.go").touch()
    until(lambda: run(sql_url, LEFT)[0][0] == 0)

    assert worker.stop() == 0, worker.said()
    assert [tuple(row) for row in run(sql_url, TIMES)] == [("completed", 1, True)] * 3
    assert "lease.lost" not in worker.said()
    assert "clock.jumped" not in worker.said()


@pytest.mark.parametrize("offset", ["+300", "-300"])
def test_a_jump_of_the_servers_clock_is_told_and_costs_no_task(
    start: Start, tmp_path: Path, set_clock: Path, monkeypatch: pytest.MonkeyPatch, offset: str
) -> None:
    server = Server(tmp_path / "server")
    monkeypatch.delenv("LD_PRELOAD")  # the server's clock alone
    try:
        with server.way() as way:
            asyncio.run(enqueue(way))
            workers = [start(url=way, settings={**QUICK, "lease": 10}) for _ in range(2)]
            # All but the one that waits: one not due yet would not be for as long as it jumps.
            until(lambda: len(run(server.url, "SELECT FROM windlass.task")) == 1)
            until((tmp_path / "ledger").exists)
            set_clock.write_text(offset)
            until(lambda: any(worker.has_said("clock.jumped") for worker in workers))
            until(lambda: run(server.url, LASTING) != [])  # by the new clock
            (tmp_path / "across.go").touch()
            until(lambda: run(server.url, LEFT)[0][0] == 0)

            for worker in workers:
                assert worker.stop() == 0, worker.said()
        assert all("lease.lost" not in worker.said() for worker in workers)
        statuses = run(server.url, "SELECT status::text, count(*) FROM windlass.tasks GROUP BY 1")
        assert [tuple(row) for row in statuses] == [("completed", 3)]
    finally:
        set_clock.write_text("+0")
        server.release()


def test_a_leader_that_starts_after_a_jump_ahead_waits_for_those_that_live(
    start: Start, tmp_path: Path, set_clock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(tmp_path / "server")
    monkeypatch.delenv("LD_PRELOAD")
    rarely = {**QUICK, "lease": 10, "heartbeat": 5}
    try:
        with server.way() as way:
            asyncio.run(enqueue(way))
            run(server.url, SEAT_OF_SOMEBODY_LOST)
            worker = start(url=way, settings={**rarely, "leader_term": 60})
            until((tmp_path / "ledger").exists)
            (registered,) = run(server.url, BEATEN)
            until(lambda: run(server.url, BEATEN) != [registered])  # and not again for a while
            set_clock.write_text("+300")
            other = start(url=way, settings=rarely)
            until(lambda: other.has_said("leader.elected"))
            until(lambda: run(server.url, KEPT) != [] or worker.has_said("lease.lost"))
            (tmp_path / "across.go").touch()
            until(lambda: run(server.url, LEFT)[0][0] == 0)

            assert [worker.stop(), other.stop()] == [0, 0], other.said()
        assert "lease.lost" not in worker.said()
    finally:
        set_clock.write_text("+0")
        server.release()


def test_what_a_leader_held_that_was_lost_when_the_servers_clock_was_set_back_is_taken_over(
    start: Start, tmp_path: Path, set_clock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(tmp_path / "server")
    monkeypatch.delenv("LD_PRELOAD")
    try:
        with server.way() as way:
            asyncio.run(enqueue(way))
            leader = start(url=way, settings=QUICK)
            until(lambda: len(run(server.url, "SELECT FROM windlass.task")) == 1)
            until((tmp_path / "ledger").exists)
            leader.end()
            set_clock.write_text("-1d")  # its seat, its sign of life and its claim end tomorrow
            other = start(url=way, settings=QUICK)
            (tmp_path / "across.go").touch()
            until(lambda: run(server.url, LEFT)[0][0] == 0)

            until(lambda: other.has_said("worker.removed"))
            assert other.stop() == 0, other.said()
        assert run(server.url, "SELECT FROM windlass.worker") == []
    finally:
        set_clock.write_text("+0")
        server.release()
