"""A handler that stops the worker's event loop, or all of Python, is found out and costs little."""

import asyncio
import ctypes
import re
import time
from collections.abc import Callable

import pytest
import uvloop

from acceptance.quick import QUICK
from windlass import App
from windlass.telemetry import counted


@pytest.mark.parametrize("new_event_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_handler_that_blocks_the_event_loop_is_named_with_its_stack(
    app_url: str,
    caplog: pytest.LogCaptureFixture,
    new_event_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    def crunch() -> None:
        time.sleep(1.6)

    async def main() -> str:
        async with App(app_url, **QUICK) as app:

            @app.task
            async def greedy() -> None:
                crunch()

            handle = await greedy.enqueue()
            await app.run_worker(until_idle=True)
            assert (await handle.get()).generation == 1
            return handle.id

    loop = new_event_loop()
    task_id = loop.run_until_complete(main())
    loop.close()

    named = f"type=greedy task_id={task_id} stack="
    (told,) = [line for line in caplog.messages if "loop.blocked" in line and named in line]
    assert re.search(
        r"stack=[^ ]*test_event_loop\.py:\d+ greedy > [^ ]*test_event_loop\.py:\d+ crunch$", told
    )


async def test_a_loop_that_turns_is_not_said_to_be_blocked(
    app: App, caplog: pytest.LogCaptureFixture
) -> None:
    @app.task
    def in_a_thread() -> None:
        time.sleep(1.6)

    await in_a_thread.enqueue()
    await app.run_worker(until_idle=True)

    assert "loop.blocked" not in caplog.text


async def test_code_that_holds_the_global_lock_past_the_lease_loses_it_and_commits_nothing(
    app: App, caplog: pytest.LogCaptureFixture
) -> None:
    runs: list[int] = []
    lost_before = counted("lease.lost")

    @app.task
    async def rude() -> int:
        runs.append(1)
        if len(runs) == 1:
            ctypes.PyDLL(None).sleep(4)  # unlike CDLL it keeps the lock
        return len(runs)

    handle = await rude.enqueue()
    await app.run_worker(until_idle=True)

    assert await handle.result(timeout=10) == 2
    assert (await handle.get()).generation == 2
    assert f"lease.lost task_id={handle.id} type=rude" in caplog.text
    assert counted("lease.lost") > lost_before
    assert "loop.blocked" in caplog.text
