"""A coroutine that never comes back to the event loop fails when its time is over, and costs others little."""

import asyncio
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import uvloop

from acceptance.quick import QUICK
from windlass import App, Retry, TaskRecord, TaskState

LIMIT = 0.2  # seconds
FOR_EVER = 1e6


def compute() -> None:
    while True:
        pass


def sleep() -> None:
    time.sleep(FOR_EVER)


def wait_for_a_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def wait_for_an_answer() -> None:
    one, other = socket.socketpair()
    with one, other:
        one.recv(1)


def wait_for_a_program() -> None:
    subprocess.run([sys.executable, "-c", f"import time; time.sleep({FOR_EVER})"], check=False)


def go_on_after_errors() -> None:
    while True:
        with suppress(Exception):
            time.sleep(FOR_EVER)


WAYS: list[Callable[[], None]] = [
    *(compute, sleep, wait_for_a_lock, wait_for_an_answer, wait_for_a_program, go_on_after_errors)
]


def run_blocking(
    url: str,
    define: Callable[[App], Any],
    new_event_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
) -> list[TaskRecord]:
    """Run tasks that block between tasks that do not; return what became of the former."""

    async def main() -> list[TaskRecord]:
        async with App(url, **QUICK) as app:

            @app.task
            async def good() -> None:
                await asyncio.sleep(0)

            others = [await good.enqueue() for _ in range(5)]
            handles = await define(app)
            others += [await good.enqueue() for _ in range(5)]
            await app.run_worker(until_idle=True)
            for handle in others:
                record = await handle.get()
                assert (record.status, record.attempts) == (TaskState.COMPLETED, 1)
            return [await handle.get() for handle in handles]

    loop = new_event_loop()
    try:
        return loop.run_until_complete(main())
    finally:
        loop.close()


def check_timed_out(record: TaskRecord) -> dict[str, Any]:
    assert record.status is TaskState.DEAD
    error = record.errors[-1]
    assert (error["type"], error["class"]) == ("TimeoutError", "transient")
    assert error["message"].startswith("took longer than 0.2 s")
    return error


def check_interrupted(record: TaskRecord, where: str) -> None:
    error = check_timed_out(record)
    assert "it blocked the event loop" in error["message"]
    assert where in error["traceback"]


@pytest.mark.parametrize("new_event_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_it_is_interrupted_whatever_it_waits_for(
    database_url: str, new_event_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def define(app: App) -> list[Any]:
        @app.task(timeout=LIMIT, retry=1)
        async def block(way: int) -> None:
            WAYS[way]()

        return [await block.enqueue(way) for way in range(len(WAYS))]

    records = run_blocking(database_url, define, new_event_loop)

    for record, way in zip(records, WAYS, strict=True):
        check_interrupted(record, way.__name__)
    assert signal.getsignal(signal.SIGURG) is signal.SIG_DFL


def test_so_is_what_it_has_started_or_is_wrapped_in() -> None:
    async def define(app: App) -> list[Any]:
        breaker = app.breaker("slow", failures=50)

        @app.middleware
        async def around(_: Any, call_next: Callable[[], Any]) -> Any:
            return await call_next()

        @app.task(timeout=LIMIT, retry=1)
        async def gathered() -> None:
            async def part() -> None:
                compute()

            await asyncio.gather(part())

        @app.task(timeout=LIMIT, retry=1)
        async def grouped() -> None:
            async def part() -> None:
                compute()

            async with asyncio.TaskGroup() as group:
                group.create_task(part())

        @app.task(timeout=LIMIT, retry=1)
        async def protected() -> None:
            @breaker
            def call() -> None:
                compute()

            call()

        return [await one.enqueue() for one in (gathered, grouped, protected)]

    gathered, grouped, protected = run_blocking("memory:", define)

    # Their event loop turns, and cancels the handler as any other, before it hears of its part.
    check_timed_out(gathered)
    check_timed_out(grouped)
    check_interrupted(protected, "compute")


def test_each_attempt_is_tried_and_ended() -> None:
    async def define(app: App) -> list[Any]:
        @app.task(timeout=LIMIT, retry=Retry(max_attempts=3, base=0.0))
        async def block() -> None:
            compute()

        return [await block.enqueue()]

    (record,) = run_blocking("memory:", define)

    check_interrupted(record, "compute")
    assert record.attempts == 3


def test_one_that_blocks_within_its_time_is_left_alone() -> None:
    async def define(app: App) -> list[Any]:
        @app.task(timeout=30, retry=1)
        async def block() -> str:
            time.sleep(1.2)
            return "done"

        return [await block.enqueue()]

    (record,) = run_blocking("memory:", define)

    assert (record.status, record.result) == (TaskState.COMPLETED, "done")


def test_a_program_keeps_its_own_use_of_the_signal() -> None:
    heard = []

    async def define(app: App) -> list[Any]:
        @app.task(timeout=LIMIT, retry=1)
        async def block() -> None:
            time.sleep(1.0)

        return [await block.enqueue()]

    before = signal.signal(signal.SIGURG, lambda *_: heard.append(True))
    try:
        (record,) = run_blocking("memory:", define)
    finally:
        signal.signal(signal.SIGURG, before)

    assert record.status is TaskState.COMPLETED
    assert not heard


def test_one_that_is_told_to_end_and_blocks_instead_is_interrupted() -> None:
    async def define(app: App) -> list[Any]:
        running = asyncio.Event()

        @app.task(retry=1)
        async def block() -> None:
            running.set()
            try:
                await asyncio.sleep(FOR_EVER)
            except asyncio.CancelledError:
                compute()

        handle = await block.enqueue()

        async def cancel() -> None:
            await running.wait()
            await handle.cancel("no need")

        cancelling.append(asyncio.create_task(cancel()))
        return [handle]

    cancelling: list[asyncio.Task[None]] = []
    (record,) = run_blocking("memory:", define)

    assert (record.status, record.last_error) == (TaskState.CANCELLED, "no need")


@dataclass
class Endless:
    n: int
    blocks: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.blocks:
            compute()


def test_one_whose_arguments_block_when_they_are_read_is_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def define(app: App) -> list[Any]:
        @app.task(timeout=LIMIT, retry=1)
        async def block(value: Endless) -> None: ...

        handle = await block.enqueue(Endless(1))
        monkeypatch.setattr(Endless, "blocks", True)
        return [handle]

    check_interrupted(run_blocking("memory:", define)[0], "compute")


def test_many_that_block_one_after_the_other_are_each_interrupted() -> None:
    async def define(app: App) -> list[Any]:
        @app.task(timeout=LIMIT, retry=1)
        async def block() -> None:
            compute()

        return [await block.enqueue() for _ in range(8)]

    for record in run_blocking("memory:", define):
        check_interrupted(record, "compute")
