"""Waiting for the first of several, pauses, and a block that the task beside it cancels."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from datetime import timedelta

import pytest

from windlass.model.errors import StoreUnavailable
from windlass.service import (
    Stop,
    answered_within,
    backoff,
    cancelled_by,
    first_of,
    in_thread,
    patience,
    stop_task,
)


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


@pytest.mark.parametrize("failures", [1, 5, 50, 100_000])
def test_a_pause_grows_to_the_longest_and_is_never_the_same_for_all(failures: int) -> None:
    pauses = {backoff(failures, longest=2.0) for _ in range(200)}

    whole = min(0.1 * 2**failures, 2.0) if failures < 10 else 2.0
    assert len(pauses) > 100
    assert whole / 2 <= min(pauses) < max(pauses) <= whole


@pytest.mark.parametrize(("lease", "seconds"), [(1, 5), (12, 12), (3600, 30)])
def test_an_answer_is_waited_for_as_long_as_a_lease_within_reason(lease: int, seconds: int) -> None:
    assert patience(timedelta(seconds=lease)) == seconds


async def test_what_a_stopped_task_had_died_of_is_raised() -> None:
    failing = asyncio.Event()
    task = asyncio.create_task(fail_after(failing))
    failing.set()
    await asyncio.wait([task])

    with pytest.raises(LookupError):
        await stop_task(task)


async def test_whoever_asks_to_be_told_of_a_request_to_stop_is_told_of_one_that_was_made() -> None:
    stop = Stop()
    before, after = asyncio.Event(), asyncio.Event()
    stop.tell(before)
    was_told = before.is_set()
    stop.set()
    stop.tell(after)

    assert (was_told, before.is_set(), after.is_set()) == (False, True, True)


@pytest.mark.parametrize("raises", [True, False])
async def test_a_store_that_is_silent_cannot_be_reached_whoever_gave_up_on_it(raises: bool) -> None:
    async def give_up() -> None:
        raise TimeoutError

    with pytest.raises(StoreUnavailable, match=r"no answer within 0\.01 s"):
        async with answered_within(0.01):
            await (give_up() if raises else asyncio.Event().wait())


async def test_what_is_raised_before_the_limit_stays_what_it_is() -> None:
    failing = asyncio.Event()
    failing.set()
    with pytest.raises(LookupError):
        async with answered_within(10):
            await fail_after(failing)
    async with answered_within(10):
        pass


async def test_a_call_in_a_thread_of_its_own_needs_none_of_the_event_loop() -> None:
    go_on = threading.Event()
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(1))
    hanging = asyncio.create_task(asyncio.to_thread(go_on.wait, 30))
    await asyncio.sleep(0)

    async with asyncio.timeout(20):
        assert await in_thread(str.upper, "done") == "DONE"
        with pytest.raises(RuntimeError, match="StopIteration"):
            await in_thread(next, iter(()))

    assert not hanging.done()
    go_on.set()
    await hanging


async def test_a_call_in_a_thread_sees_what_was_set_here() -> None:
    here: ContextVar[str] = ContextVar("here")
    here.set("set")

    assert await in_thread(here.get) == "set"


async def test_nobody_is_told_of_a_call_in_a_thread_that_was_given_up() -> None:
    go_on, over = threading.Event(), threading.Event()

    def call() -> None:
        go_on.wait(30)
        over.set()

    given_up = asyncio.create_task(in_thread(call))
    await asyncio.sleep(0)
    given_up.cancel()
    go_on.set()
    await in_thread(over.wait, 30)
    await asyncio.sleep(0)

    assert given_up.cancelled()
