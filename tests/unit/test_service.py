"""Waiting for the first of several, and a block that the task beside it cancels."""

import asyncio

import pytest

from windlass.service import cancelled_by, first_of


async def fail_after(event: asyncio.Event) -> None:
    await event.wait()
    raise LookupError("no such table")


async def test_a_failure_ends_the_block_and_is_for_whoever_awaits_the_task() -> None:
    failing = asyncio.Event()
    task = asyncio.create_task(fail_after(failing))
    reached = False
    async with cancelled_by(task):
        failing.set()
        await asyncio.wait_for(asyncio.Event().wait(), 10)
        reached = True

    assert not reached
    with pytest.raises(LookupError):
        await task
    current = asyncio.current_task()
    assert current is not None
    assert not current.cancelling()


async def test_a_cancellation_from_outside_goes_on() -> None:
    inside = asyncio.Event()
    task = asyncio.create_task(fail_after(asyncio.Event()))

    async def serve() -> None:
        async with cancelled_by(task):
            inside.set()
            await asyncio.Event().wait()

    serving = asyncio.create_task(serve())
    await inside.wait()
    serving.cancel()
    await asyncio.wait([serving])
    task.cancel()

    assert serving.cancelled()


async def test_a_failure_after_the_block_cancels_nothing() -> None:
    failing = asyncio.Event()
    task = asyncio.create_task(fail_after(failing))
    async with cancelled_by(task):
        pass
    failing.set()
    await asyncio.wait([task])
    await asyncio.sleep(0)

    assert isinstance(task.exception(), LookupError)


async def test_a_task_that_ends_well_leaves_the_block_alone() -> None:
    failing = asyncio.Event()
    task = asyncio.create_task(asyncio.sleep(0))
    async with cancelled_by(task):
        await asyncio.wait([task])
        await asyncio.sleep(0)
        failing.set()

    assert failing.is_set()


async def test_who_comes_second_is_waited_for_no_longer() -> None:
    second = asyncio.create_task(asyncio.Event().wait())
    await first_of(asyncio.sleep(0), second)
    await asyncio.wait([second], timeout=10)

    assert second.cancelled()
