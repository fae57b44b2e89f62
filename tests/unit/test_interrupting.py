"""A handler is interrupted in its own code alone, and only when its time is over."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

import windlass
from windlass.context import current_job
from windlass.model.task import Claim, ClaimedTask
from windlass.runtime.interrupting import SIGNAL, Interrupter, Overran
from windlass.runtime.job import Halt, Job

OURS = Path(windlass.__file__).parent


@pytest.fixture
async def interrupter() -> AsyncIterator[Interrupter]:
    interrupter = Interrupter()
    interrupter.install()
    yield interrupter
    interrupter.remove()


def be_overdue() -> Job:
    """Be the handler of a job whose time is over."""
    task = ClaimedTask(UUID(int=1), "t", "q", 10, "{}", 0, 4, 1, None)
    job = Job(Claim(UUID(int=100), 1, (task,)), task, 5.0)
    job.started_at = time.monotonic() - 3.0
    job.give_way_at = job.started_at + 2.0
    job.runner = asyncio.current_task()
    current_job.set((None, job))
    return job


def hit() -> bool:
    """Be somewhere when the signal comes; return whether it raised there."""
    try:
        os.kill(os.getpid(), SIGNAL)
        for _ in range(1000):
            pass  # Python looks for signals when it goes back
    except Overran:
        return True
    return False


def called_by(*files: str) -> Callable[[], Any]:
    """Make a call of `hit` through functions of these files, the first one innermost."""
    call: Callable[[], Any] = hit
    for file in files:
        scope: dict[str, Any] = {"call": call}
        exec(compile("def through():\n    return call()", file, "exec"), scope)
        call = scope["through"]
    return call


def inside(file: str) -> Callable[[], Any]:
    """Make a function of this file in which the signal comes."""
    scope: dict[str, Any] = {"os": os, "SIGNAL": SIGNAL}
    text = (
        "def itself():\n    os.kill(os.getpid(), SIGNAL)\n    for _ in range(1000):\n        pass"
    )
    exec(compile(text, file, "exec"), scope)
    itself: Callable[[], Any] = scope["itself"]
    return itself


@pytest.mark.parametrize(
    ("files", "raises"),
    [
        ((), True),
        (("handlers.py",), True),
        ((str(OURS / "runtime/executor.py"), str(OURS / "runtime/carrier.py")), True),
        ((str(OURS / "breaker.py"), "handlers.py", str(OURS / "runtime/executor.py")), True),
        ((str(OURS / "store/postgres/statements.py"), "handlers.py"), False),
        (("driver.py", str(OURS / "client/verbs.py"), "handlers.py"), False),
        (("arguments.py", str(OURS / "codec.py"), str(OURS / "runtime/executor.py")), True),
        (("logging.py", str(OURS / "telemetry.py"), str(OURS / "runtime/executor.py")), False),
    ],
)
@pytest.mark.usefixtures("interrupter")
async def test_what_we_do_for_a_handler_is_not_cut_off(
    files: tuple[str, ...], raises: bool
) -> None:
    be_overdue()
    assert called_by(*files)() is raises


@pytest.mark.usefixtures("interrupter")
async def test_nor_is_the_event_loops_own_code() -> None:
    be_overdue()
    inside(str(Path(asyncio.__file__).parent / "timeouts.py"))()


@pytest.mark.usefixtures("interrupter")
async def test_nor_is_our_own_code() -> None:
    be_overdue()
    inside(str(OURS / "runtime/executor.py"))()
    with pytest.raises(Overran, match="took longer than 2 s; it blocked the event loop"):
        inside("handlers.py")()


@pytest.mark.usefixtures("interrupter")
async def test_one_whose_time_is_not_over_or_that_has_ended_goes_on() -> None:
    job = be_overdue()
    limit, job.give_way_at = job.give_way_at, time.monotonic() + 60
    assert not hit()
    job.give_way_at = limit
    runner, job.runner = job.runner, None
    assert not hit()
    job.runner = runner
    assert hit()
    job.halt = Halt.CANCELLED  # whatever its time limit was
    assert hit()


@pytest.mark.usefixtures("interrupter")
async def test_what_is_no_handler_goes_on() -> None:
    assert not hit()


async def test_what_only_the_event_loop_has_called_goes_on(interrupter: Interrupter) -> None:
    be_overdue()
    interrupter.frames_below = 1000
    assert not hit()


async def test_whose_code_runs_is_found_out_though_its_time_is_not_over(
    interrupter: Interrupter,
) -> None:
    began = time.monotonic()
    job = be_overdue()
    job.give_way_at = time.monotonic() + 60

    assert not hit()
    assert interrupter.met is job
    assert began <= interrupter.met_at <= time.monotonic()
    current_job.set(None)
    assert not hit()
    assert interrupter.met is None


async def test_what_has_the_place_of_a_job_and_is_none_goes_on(interrupter: Interrupter) -> None:
    other: Any = object()  # as in a process that runs handlers for a worker
    current_job.set((None, other))

    assert not hit()
    assert interrupter.met is None


def test_what_runs_in_another_event_loop_goes_on() -> None:
    async def installed() -> Interrupter:
        interrupter = Interrupter()
        interrupter.install()
        return interrupter

    async def is_interrupted() -> bool:
        be_overdue()
        return hit()

    interrupter = asyncio.run(installed())
    try:
        assert not asyncio.run(is_interrupted())
        assert interrupter.met is None
    finally:
        interrupter.remove()


async def test_a_program_with_a_use_of_its_own_for_the_signal_is_sent_none() -> None:
    taken: list[int] = []
    signal.signal(SIGNAL, lambda number, _: taken.append(number))
    try:
        interrupter = Interrupter()
        interrupter.install()
        interrupter.interrupt()
        assert taken == []
        interrupter.remove()
        assert not hit()
        assert taken == [SIGNAL]
    finally:
        signal.signal(SIGNAL, signal.SIG_DFL)


async def test_the_signal_is_taken_while_it_is_of_use_and_only_then() -> None:
    be_overdue()
    first, second = Interrupter(), Interrupter()
    first.install()
    second.install()
    first.remove()
    assert hit()
    second.remove()
    second.remove()
    assert signal.getsignal(SIGNAL) is signal.SIG_DFL
    second.interrupt()  # nobody would be there to take it
    assert not hit()


def test_in_another_thread_nothing_is_done() -> None:
    failed: list[BaseException] = []

    async def run() -> None:
        interrupter = Interrupter()
        interrupter.install()
        interrupter.interrupt()
        interrupter.remove()

    def work() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:
            failed.append(error)

    with suppress(Overran):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    assert not failed
    assert signal.getsignal(SIGNAL) is signal.SIG_DFL
