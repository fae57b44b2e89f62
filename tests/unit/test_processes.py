"""Processes are there when they are needed, bear whatever a handler does, and are replaced when they end."""

import asyncio
import errno
import json
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Never
from uuid import UUID

import pytest

from unit import process_handlers
from windlass.model.failure import ErrorClass
from windlass.runtime.processes import pool as pool_module
from windlass.runtime.processes import process as process_module
from windlass.runtime.processes.finding import Program
from windlass.runtime.processes.guarding import Guarding
from windlass.runtime.processes.messages import Answer, Died, Raised, Returned, Run
from windlass.runtime.processes.options import Wear
from windlass.runtime.processes.pool import Pool, Running

MODULE = "unit.process_handlers"
WITHIN = 60.0  # seconds
INPUT = ErrorClass.PERMANENT_INPUT
Make = Callable[..., Pool]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    made: list[Pool] = []

    def make(size: int = 1, **wear: Any) -> Pool:
        made.append(Pool(size=size, program=Program("", "memory:", (MODULE,)), wear=Wear(**wear)))
        return made[-1]

    yield make
    for pool in made:
        await asyncio.wait_for(pool.stop(), WITHIN)


@pytest.fixture
async def pool(make: Make) -> Pool:
    pool = make()
    await pool.start()
    return pool


def message(name: str, payload: str = "{}", *, module: str = MODULE, **options: Any) -> Run:
    asked: dict[str, Any] = {
        "task_id": UUID(int=1), "token": UUID(int=2), "generation": 3, "fence": 4, "attempt": 2,
        "max_attempts": 5, "queue": "default", "worker_id": "me", "timeout": None,
        "keep_result": True, "max_result_bytes": 2 << 20, "error_paths": [],
    } | options  # fmt: skip
    return Run(type="work", module=module, qualname=name, payload=payload, **asked)


async def begin(pool: Pool, name: str, **arguments: Any) -> Running:
    async with asyncio.timeout(WITHIN):
        running = await pool.begin(message(name, json.dumps(arguments)))
    assert isinstance(running, Running)
    return running


async def run(pool: Pool, asked: Run) -> Answer:
    async with asyncio.timeout(WITHIN):
        running = await pool.begin(asked)
        return running if isinstance(running, Died) else await running.answer


async def result(pool: Pool, name: str, **arguments: Any) -> Any:
    answer = await run(pool, message(name, json.dumps(arguments)))
    assert isinstance(answer, Returned), answer
    return None if answer.result is None else json.loads(answer.result)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WITHIN):
        while not condition():
            await asyncio.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


async def noted(path: Path) -> int:
    """The number that a handler has written down, once it has."""

    def read() -> str:
        return path.read_text() if path.exists() else ""

    await until(read)
    return int(read())


async def test_processes_are_ready_before_they_are_needed_and_used_again(make: Make) -> None:
    pool = make(2)
    await pool.start()
    assert pool.filled == (0, 2)

    used = {await result(pool, "pid") for _ in range(5)}

    assert len(used) == 1
    assert os.getpid() not in used
    assert not pool.restarts


@pytest.mark.parametrize("name", ["double", "double_later"])
async def test_plain_functions_and_coroutines_return_what_they_return(
    pool: Pool, name: str
) -> None:
    assert await result(pool, name, n=21) == 42


async def test_a_handler_is_told_about_its_task(pool: Pool) -> None:
    answer = await run(pool, message("told", timeout=1000.0))

    assert isinstance(answer, Returned)
    told = json.loads(answer.result or "")
    assert told.pop("deadline") is not None
    assert told == {
        "task_id": str(UUID(int=1)), "type": "work", "attempt": 2, "max_attempts": 5,
        "queue": "default", "worker_id": "me", "fence": 4, "state": None, "cancelled": False,
    }  # fmt: skip


async def test_a_handler_cannot_end_its_own_task(pool: Pool) -> None:
    answer = await run(pool, message("end_itself"))

    assert isinstance(answer, Raised)
    assert "return the result, or define the task with run='async'" in answer.error


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("value", "ValueError", "not that"),
        ("exit", "SystemExit", "3"),
        ("interrupt", "KeyboardInterrupt", "KeyboardInterrupt"),
        ("base", "OfTheBase", "OfTheBase"),
        ("no text", "NoTextError", "<its text raised LookupError>"),
    ],
)
async def test_what_is_raised_comes_back_with_its_traceback_and_the_process_lives(
    pool: Pool, name: str, kind: str, said: str
) -> None:
    before = await result(pool, "pid")
    answer = await run(pool, message("raising", json.dumps({"name": name})))

    assert isinstance(answer, Raised)
    error = json.loads(answer.error)
    assert (error["type"], error["message"]) == (kind, said)
    assert answer.facts is not None
    assert "in raising\n    raise error" in error["traceback"]
    assert await result(pool, "pid") == before


async def test_steering_comes_back_as_what_it_says(pool: Pool) -> None:
    snooze, later, fail = [
        await run(pool, message("raising", json.dumps({"name": name})))
        for name in ("snooze", "later", "fail")
    ]

    assert isinstance(snooze, Raised)
    assert isinstance(later, Raised)
    assert isinstance(fail, Raised)
    assert snooze.snooze == 7
    assert (later.retry_after, json.loads(later.error)["message"]) == (9, "busy")
    assert fail.error_class is ErrorClass.PERMANENT_INPUT
    assert json.loads(fail.error)["message"] == "for good"


@pytest.mark.parametrize(
    ("asked", "kind", "error_class"),
    [
        (message("double", '{"n": "two"}'), "PayloadError", INPUT),
        (message("double", "{}"), "PayloadError", INPUT),
        (message("no_json"), "PayloadError", ErrorClass.CODE_BUG),
        (
            message("text_of", '{"size": 1000}', max_result_bytes=1000),
            "PayloadError",
            ErrorClass.CODE_BUG,
        ),
        (message("nowhere"), "AttributeError", ErrorClass.TRANSIENT),
        (
            message("double", module="unit.no_such_module"),
            "ModuleNotFoundError",
            ErrorClass.TRANSIENT,
        ),
    ],
    ids=["payload", "argument", "result", "large result", "function", "module"],
)
async def test_what_cannot_be_called_or_kept_fails_and_the_process_lives(
    pool: Pool, asked: Run, kind: str, error_class: ErrorClass
) -> None:
    before = await result(pool, "pid")
    answer = await run(pool, asked)

    assert isinstance(answer, Raised)
    assert (json.loads(answer.error)["type"], answer.error_class) == (kind, error_class)
    assert await result(pool, "pid") == before


async def test_a_large_payload_and_a_large_result_pass(pool: Pool) -> None:
    assert len(await result(pool, "text_of", size=1 << 20)) == 1 << 20
    answer = await run(pool, message("double", json.dumps({"n": 1, "x": "y" * (1 << 20)})))
    assert isinstance(answer, Raised)  # it was read, and has an argument too many


async def test_a_result_that_is_not_to_be_kept_is_not_looked_at(pool: Pool) -> None:
    answer = await run(pool, message("no_json", keep_result=False))

    assert isinstance(answer, Returned)
    assert answer.result is None


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("segfault", "was ended by signal 11 (SIGSEGV)"),
        ("leave", "ended with exit code 3"),
        ("kill_itself", "was ended by signal 9 (SIGKILL), which its worker did not send: perhaps"),
        ("close_everything", "lost the connection to its worker"),
    ],
)
async def test_a_process_that_dies_says_how_and_another_takes_its_place(
    pool: Pool, name: str, reason: str
) -> None:
    before = await result(pool, "pid")
    answer = await run(pool, message(name))

    assert isinstance(answer, Died)
    assert answer.reason.startswith(reason)
    assert await result(pool, "pid") != before
    assert pool.restarts == {"died": 1}


async def test_a_process_that_is_killed_while_nothing_runs_is_replaced(pool: Pool) -> None:
    before = await result(pool, "pid")
    os.kill(before, signal.SIGKILL)
    await until(lambda: pool.restarts)

    assert await result(pool, "pid") != before
    assert pool.restarts == {"died": 1}


async def test_a_handler_that_forks_answers_once(pool: Pool) -> None:
    first = await result(pool, "fork")

    assert await result(pool, "double", n=4) == 8
    assert await result(pool, "pid") == first


async def test_the_end_of_a_process_is_seen_although_a_copy_holds_its_connection(
    pool: Pool,
) -> None:
    copy = await result(pool, "fork_and_stay")
    answer = await run(pool, message("leave"))

    assert isinstance(answer, Died)
    await until(lambda: not is_alive(copy))


async def test_threads_and_garbage_that_handlers_leave_do_no_harm(make: Make) -> None:
    pool = make()
    await pool.start()
    for name in ("leave_a_thread", "print_garbage", "leave_a_thread"):
        await result(pool, name)
    pid = await result(pool, "pid")

    await asyncio.wait_for(pool.stop(), WITHIN)

    assert not is_alive(pid)


async def test_what_is_killed_ends_at_once_with_whatever_it_had_started(
    pool: Pool, tmp_path: Path
) -> None:
    before = await result(pool, "pid")
    running = await begin(pool, "start_program", noted=str(tmp_path / "noted"))
    program = await noted(tmp_path / "noted")
    assert pool.filled == (1, 1)

    running.kill()
    await until(lambda: not is_alive(before) and not is_alive(program))

    assert await result(pool, "pid") != before
    assert pool.restarts == {"killed": 1}


async def test_no_handler_can_refuse_to_be_killed(pool: Pool, tmp_path: Path) -> None:
    running = await begin(pool, "ignore_signals", noted=str(tmp_path / "noted"))
    pid = await noted(tmp_path / "noted")

    running.kill()

    await until(lambda: not is_alive(pid))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_signals_for_the_worker_end_no_handler(
    pool: Pool, tmp_path: Path, number: signal.Signals
) -> None:
    running = await begin(pool, "until_cancelled", noted=str(tmp_path / "noted"))
    pid = await noted(tmp_path / "noted")
    os.kill(pid, number)

    running.cancel()
    answer = await asyncio.wait_for(running.answer, WITHIN)

    assert isinstance(answer, Returned)
    assert answer.result == '"gave way"'


async def test_a_coroutine_that_is_to_give_way_is_cancelled(pool: Pool, tmp_path: Path) -> None:
    running = await begin(pool, "until_cancelled_in_a_coroutine", noted=str(tmp_path / "noted"))
    pid = await noted(tmp_path / "noted")
    running.cancel()
    answer = await asyncio.wait_for(running.answer, WITHIN)

    assert isinstance(answer, Raised)
    assert json.loads(answer.error)["type"] == "CancelledError"
    assert await result(pool, "pid") == pid


@pytest.mark.parametrize(
    ("wear", "reason"),
    [({"tasks": 2}, "tasks"), ({"memory": 1}, "memory"), ({"age": 0.001}, "age")],
)
async def test_a_process_that_is_used_up_is_replaced(
    make: Make, wear: dict[str, Any], reason: str
) -> None:
    pool = make(**wear)
    await pool.start()
    used = {await result(pool, "pid") for _ in range(5)}

    assert len(used) >= 3
    assert set(pool.restarts) == {reason}
    assert not any(is_alive(pid) for pid in used if pid not in alive(pool))


def alive(pool: Pool) -> set[int | None]:
    return {process.pid for process in pool._all}


async def test_a_process_grows_old_while_nothing_runs(make: Make) -> None:
    pool = make(age=0.2)
    await pool.start()

    await until(lambda: pool.restarts["age"] >= 1)


async def test_what_is_not_used_up_stays(make: Make) -> None:
    pool = make(tasks=6, age=3600, memory=1 << 40)
    await pool.start()

    assert len({await result(pool, "pid") for _ in range(6)}) == 1


async def test_a_process_that_cannot_start_fails_who_waits_and_is_tried_ever_later(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[int] = []

    def backoff(failures: int) -> float:
        pauses.append(failures)
        return 0.01

    monkeypatch.setattr(pool_module, "backoff", backoff)
    broken = SimpleNamespace(main=process_handlers.fail_to_start, CUT_OFF=113)
    monkeypatch.setattr(process_module, "child", broken)
    pool = make()
    await pool.start()
    answer = await run(pool, message("pid"))

    assert isinstance(answer, Died)
    assert answer.reason.startswith("ended with exit code 7 before it was ready")
    await until(lambda: len(pauses) >= 3)
    assert pauses[:3] == [1, 2, 3]

    monkeypatch.undo()
    assert await result(pool, "double", n=1) == 2


@pytest.mark.parametrize("lacking", ["socketpair", "connection"])
async def test_a_process_for_which_there_is_no_descriptor_is_tried_again(
    make: Make, monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    def refuse(**_: object) -> Never:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(pool_module, "backoff", lambda _: 0.01)
    if lacking == "socketpair":
        monkeypatch.setattr(process_module, "socket", SimpleNamespace(socketpair=refuse))
    else:
        monkeypatch.setattr(asyncio, "open_unix_connection", refuse)
    pool = make()
    await pool.start()
    answer = await run(pool, message("pid"))

    assert isinstance(answer, Died)
    assert "could not be started: OSError(24" in answer.reason

    monkeypatch.undo()
    assert await result(pool, "double", n=1) == 2


async def test_a_process_that_does_not_get_ready_is_given_up(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = SimpleNamespace(main=process_handlers.never_ready, CUT_OFF=113)
    monkeypatch.setattr(process_module, "child", broken)
    monkeypatch.setattr(process_module, "READY_WITHIN", 0.01)
    pool = make()
    await pool.start()
    answer = await run(pool, message("pid"))

    assert isinstance(answer, Died)
    assert answer.reason == "was not ready within 0.01 s"


async def test_a_pool_can_be_stopped_while_its_processes_start(make: Make) -> None:
    pool = make(2)
    starting = asyncio.create_task(pool.start())
    await until(lambda: pool._all)
    await asyncio.wait_for(pool.stop(), WITHIN)
    await asyncio.wait_for(starting, WITHIN)

    assert not pool._all


async def test_a_connection_is_closed_however_soon_its_process_ends(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect, writers = asyncio.open_unix_connection, []

    async def connect_late(**options: Any) -> Any:
        reader, writer = await connect(**options)
        await asyncio.sleep(0.5)  # a process that was there has ended by then
        writers.append(writer)
        return reader, writer

    monkeypatch.setattr(asyncio, "open_unix_connection", connect_late)
    pool = make()
    starting = asyncio.create_task(pool.start())
    await until(lambda: pool._all)
    await asyncio.wait_for(pool.stop(), WITHIN)
    await asyncio.wait_for(starting, WITHIN)

    assert [writer.is_closing() for writer in writers] == [True]


async def test_who_waits_for_a_process_is_served_in_order_and_may_give_up(
    pool: Pool, tmp_path: Path
) -> None:
    first = await begin(pool, "until_cancelled", noted=str(tmp_path / "noted"))
    second, third = [asyncio.create_task(run(pool, message("pid"))) for _ in range(2)]
    await until(lambda: len(pool._waiting) == 2)
    second.cancel()
    await noted(tmp_path / "noted")
    first.cancel()

    assert isinstance(await asyncio.wait_for(third, WITHIN), Returned)
    assert second.cancelled()
    assert pool.filled == (0, 1)


async def test_stopping_leaves_no_process_behind(make: Make, tmp_path: Path) -> None:
    pool = make(2)
    await pool.start()
    await begin(pool, "ignore_signals", noted=str(tmp_path / "noted"))
    pids = alive(pool)
    await asyncio.wait_for(pool.stop(), WITHIN)

    assert len(pids) == 2
    assert not any(is_alive(pid) for pid in pids if pid)


async def test_what_handlers_log_is_logged_by_the_worker(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "shop")
    pool = make()
    await pool.start()
    await result(pool, "log", text="packed")

    info, error = [one for one in caplog.records if one.name == "shop.orders"]
    assert (info.getMessage(), info.levelname, info.funcName) == ("packed", "INFO", "log")
    assert vars(info)["order"] == 7
    assert not hasattr(info, "basket")
    assert info.process == await result(pool, "pid")
    assert error.getMessage() == "odd: ?"
    assert "KeyError: 'NO_SUCH_ORDER'" in logging.Formatter().format(error)


async def test_a_guardian_is_told_of_each_process_and_of_its_end_while_its_number_is_taken(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, int, bool]] = []
    for name in ("begin", "end"):
        monkeypatch.setattr(
            Guarding, name, lambda _, pid, name=name: told.append((name, pid, _is_known(pid)))
        )
    pool = make()
    await pool.start()
    (first,) = pool._all
    assert first.pid is not None

    os.kill(first.pid, signal.SIGKILL)
    await until(lambda: len(told) >= 3)

    assert told[:2] == [("begin", first.pid, True), ("end", first.pid, True)]
    assert told[2][0] == "begin"


def _is_known(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
