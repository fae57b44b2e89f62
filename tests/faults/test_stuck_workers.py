"""A worker that a handler has made useless is replaced by a new process, and what it held is settled before."""

import asyncio
import signal
from typing import Any

import pytest

from acceptance.quick import QUICK
from faults.conftest import Start
from faults.looking import LEFT, run
from faults.processes import WorkerProcess, until
from windlass import App
from windlass.runtime.loop_threads import MOST

GOOD = 30
TWICE = ("stubborn", "deadlocked", "waits")  # they are tried
APPLICATION = "faults.stuck_app:app"


async def enqueue(url: str, *tasks: tuple[str, dict[str, Any]]) -> None:
    async with App(url) as app:
        for n in range(GOOD):
            await app.enqueue("good", {"n": n})
        for name, payload in tasks:
            await app.enqueue(name, payload, max_attempts=2 if name in TWICE else 1)
        for n in range(GOOD):
            await app.enqueue("good", {"n": n})


def ends(url: str) -> dict[str, list[tuple[str, int, str]]]:
    found: dict[str, list[tuple[str, int, str]]] = {}
    for row in run(url, "SELECT type, status::text, attempts, last_error FROM windlass.tasks"):
        found.setdefault(row["type"], []).append(
            (row["status"], row["attempts"], row["last_error"] or "")
        )
    return found


def until_nothing_is_left(worker: WorkerProcess, url: str) -> None:
    until(lambda: worker.has_said("worker.started"))
    until(lambda: run(url, LEFT)[0][0] == 0)


@pytest.mark.parametrize("name", ["stubborn", "deadlocked"])
def test_a_handler_that_cannot_be_interrupted_costs_its_process(
    database_url: str, sql_url: str, start: Start, name: str
) -> None:
    asyncio.run(enqueue(database_url, (name, {}), ("waits", {"seconds": 2.0})))

    worker = start(application=APPLICATION)
    until_nothing_is_left(worker, sql_url)

    assert worker.stop() == 0, worker.said()
    assert worker.said().count("worker.stuck") >= 2
    assert worker.said().count("worker.started") >= 3
    ended = ends(sql_url)
    ((status, attempts, error),) = ended[name]
    assert (status, attempts) == ("dead", 2)
    assert "did not give way" in error
    assert {end[:2] for end in ended["good"]} == {("completed", 1)}
    assert len(ended["good"]) == 2 * GOOD
    assert {end[:2] for end in ended["waits"]} == {("completed", 1)}
    assert run(sql_url, "SELECT count(*) FROM windlass.worker")[0][0] == 0


def test_a_worker_with_too_many_threads_that_never_end_begins_anew(
    database_url: str, sql_url: str, start: Start
) -> None:
    asyncio.run(enqueue(database_url, *(("hung", {"n": n}) for n in range(5))))

    worker = start(application=APPLICATION, settings=QUICK | {"stuck_threads": 3})
    until(lambda: worker.said().count("worker.started") == 2)
    until_nothing_is_left(worker, sql_url)

    assert worker.stop() == 0, worker.said()
    assert worker.said().count("worker.exhausted") == 1
    assert "stuck_threads=4" in worker.said()
    ended = ends(sql_url)
    assert [end[:2] for end in ended["hung"]] == [("dead", 1)] * 5
    assert {end[:2] for end in ended["good"]} == {("completed", 1)}


def test_one_that_was_asked_to_stop_meanwhile_stops(
    database_url: str, sql_url: str, start: Start
) -> None:
    asyncio.run(
        enqueue(database_url, *(("hung", {"n": n}) for n in range(2)), ("waits", {"seconds": 60}))
    )

    worker = start(
        application=APPLICATION, settings=QUICK | {"stuck_threads": 1, "shutdown_timeout": 120}
    )
    until(lambda: worker.has_said("worker.exhausted"))
    until(lambda: worker.has_said("worker.stopping"))

    assert worker.stop() == 0, worker.said()
    assert worker.said().count("worker.started") == 1
    assert [end[:2] for end in ends(sql_url)["waits"]] == [("pending", 0)]


@pytest.mark.parametrize("name", ["calls_back", "abandoned"])
def test_a_handler_is_found_out_wherever_it_blocks(
    database_url: str, sql_url: str, start: Start, name: str
) -> None:
    asyncio.run(enqueue(database_url, (name, {})))

    worker = start(application=APPLICATION)
    until(lambda: worker.has_said("worker.stuck"))
    asyncio.run(enqueue(database_url))
    until_nothing_is_left(worker, sql_url)

    assert worker.stop() == 0, worker.said()
    ended = ends(sql_url)
    assert [end[:2] for end in ended[name]] == [("dead", 1)]
    assert {end[:2] for end in ended["good"]} == {("completed", 1)}
    assert len(ended["good"]) == 4 * GOOD


def test_a_worker_that_was_asked_to_stop_while_it_is_stuck_ends(
    database_url: str, sql_url: str, start: Start
) -> None:
    asyncio.run(enqueue(database_url, ("stubborn", {})))

    worker = start(application=APPLICATION)
    until(lambda: worker.has_said("loop.blocked"))
    worker.send(signal.SIGTERM)

    assert worker.wait() == 1, worker.said()
    assert worker.said().count("worker.started") == 1
    assert [end[:2] for end in ends(sql_url)["stubborn"]] == [("pending", 1)]


def test_threads_that_a_handler_has_started_keep_no_process(
    database_url: str, sql_url: str, start: Start
) -> None:
    asyncio.run(enqueue(database_url, ("starts_thread", {})))

    worker = start(application=APPLICATION)
    until_nothing_is_left(worker, sql_url)

    assert worker.stop() == 0, worker.said()
    assert [end[:2] for end in ends(sql_url)["starts_thread"]] == [("dead", 1)]


def test_nor_do_threads_that_the_application_starts_when_it_is_imported(
    database_url: str, sql_url: str, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THREAD_AT_IMPORT", "1")
    asyncio.run(enqueue(database_url))

    worker = start(application=APPLICATION)
    until_nothing_is_left(worker, sql_url)

    assert worker.stop() == 0, worker.said()


def test_calls_that_hang_in_threads_of_the_event_loop_leave_others_their_place(
    database_url: str, sql_url: str, start: Start
) -> None:
    tasks: list[tuple[str, dict[str, Any]]] = [("to_thread", {})] * (MOST + 2)
    asyncio.run(enqueue(database_url, *tasks, ("look_up", {})))

    worker = start(application=APPLICATION)
    until_nothing_is_left(worker, sql_url)

    assert worker.stop() == 0, worker.said()
    ended = ends(sql_url)
    assert [end[:2] for end in ended["to_thread"]] == [("dead", 1)] * (MOST + 2)
    assert [end[:2] for end in ended["look_up"]] == [("completed", 1)]


@pytest.mark.parametrize(("name", "code"), [("blocks_the_end", 1), ("blocks_at_last", 0)])
def test_a_handler_that_was_left_behind_cannot_hold_up_the_end(
    database_url: str, sql_url: str, start: Start, name: str, code: int
) -> None:
    asyncio.run(enqueue(database_url, (name, {})))

    worker = start(application=APPLICATION)
    until_nothing_is_left(worker, sql_url)
    worker.send(signal.SIGTERM)

    assert worker.wait() == code, worker.said()
    assert [end[:2] for end in ends(sql_url)[name]] == [("dead", 1)]
    assert run(sql_url, "SELECT count(*) FROM windlass.worker")[0][0] == 0


# Two that come together may be one to the system.
@pytest.mark.parametrize("signals", [(signal.SIGTERM,), (signal.SIGTERM, signal.SIGINT)])
@pytest.mark.parametrize(
    ("name", "code", "end"),
    [
        ("computes", 0, ("pending", 0)),
        ("computes_in_c", 1, ("pending", 0)),
        ("leaves_block", 1, ("completed", 1)),
    ],
)
def test_a_handler_that_blocks_and_has_no_time_limit_ends_with_its_worker(
    database_url: str,
    sql_url: str,
    start: Start,
    signals: tuple[signal.Signals, ...],
    name: str,
    code: int,
    end: tuple[str, int],
) -> None:
    asyncio.run(enqueue(database_url, (name, {})))

    within = 1 if len(signals) == 1 else 3600
    worker = start(application=APPLICATION, settings=QUICK | {"shutdown_timeout": within})
    until(lambda: worker.has_said("loop.blocked"))
    for one in signals:
        worker.send(one)
        until(lambda: worker.has_said("worker.held_up"))

    assert worker.wait() == code, worker.said()
    assert worker.said().count("worker.started") == 1
    assert [one[:2] for one in ends(sql_url)[name]] == [end]


def test_a_worker_that_is_asked_to_stop_while_c_code_blocks_it_does_not_begin_anew(
    database_url: str, sql_url: str, start: Start
) -> None:
    asyncio.run(enqueue(database_url, ("deadlocked", {})))

    worker = start(application=APPLICATION)
    until(lambda: worker.has_said("loop.blocked"))
    worker.send(signal.SIGTERM)

    assert worker.wait() == 1, worker.said()
    assert worker.said().count("worker.started") == 1
    assert [end[:2] for end in ends(sql_url)["deadlocked"]] == [("pending", 1)]


def test_a_worker_that_ends_with_an_error_waits_for_no_thread_either(
    database_url: str, sql_url: str, start: Start
) -> None:
    asyncio.run(enqueue(database_url, ("fails_the_end", {})))

    worker = start(application=APPLICATION)
    until_nothing_is_left(worker, sql_url)
    worker.send(signal.SIGTERM)

    assert worker.wait() == 1, worker.said()
    assert "RuntimeError: the last hook" in worker.said()


def test_a_signal_for_what_a_handler_has_forked_is_not_for_the_worker(
    database_url: str, sql_url: str, start: Start
) -> None:
    asyncio.run(enqueue(database_url, ("forks", {})))

    worker = start(application=APPLICATION)
    until_nothing_is_left(worker, sql_url)
    asyncio.run(enqueue(database_url))
    until_nothing_is_left(worker, sql_url)

    ((code,),) = run(sql_url, "SELECT result FROM windlass.tasks WHERE type = 'forks'")
    assert code == str(-signal.SIGTERM)
    assert not worker.has_said("worker.stopping")
    assert worker.stop() == 0, worker.said()
