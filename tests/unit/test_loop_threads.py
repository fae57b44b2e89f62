"""What handlers run in threads of the event loop: so many at once, and never held up by what hangs."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable

import pytest

from windlass.runtime import loop_threads
from windlass.runtime.loop_threads import MOST, LoopThreads
from windlass.runtime.threads import Threads

WITHIN = 30.0  # seconds


@pytest.fixture
async def threads() -> AsyncIterator[Threads]:
    threads = Threads()
    asyncio.get_running_loop().set_default_executor(LoopThreads(threads))
    yield threads
    threads.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WITHIN):
        while not condition():
            await asyncio.sleep(0.001)


async def test_a_call_returns_or_raises(threads: Threads) -> None:
    assert await asyncio.to_thread(str.upper, "done") == "DONE"
    with pytest.raises(ZeroDivisionError):
        await asyncio.to_thread(lambda: 1 / 0)
    with pytest.raises(RuntimeError, match="StopIteration"):
        await asyncio.to_thread(next, iter(()))


class Hanging:
    """Calls that go on until they are let go."""

    def __init__(self) -> None:
        self.begun = 0
        self.go_on = threading.Event()
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            self.begun += 1
        self.go_on.wait(WITHIN)


async def test_so_many_run_at_once_and_the_others_follow(threads: Threads) -> None:
    hanging = Hanging()
    calls = [asyncio.create_task(asyncio.to_thread(hanging)) for _ in range(MOST + 5)]
    await until(lambda: hanging.begun == MOST)

    hanging.go_on.set()
    async with asyncio.timeout(WITHIN):
        await asyncio.gather(*calls)
    assert hanging.begun == MOST + 5


async def test_calls_that_nobody_waits_for_leave_their_place_to_others(threads: Threads) -> None:
    hanging = Hanging()
    calls = [asyncio.create_task(asyncio.to_thread(hanging)) for _ in range(MOST)]
    await until(lambda: hanging.begun == MOST)
    for one in calls:
        one.cancel()

    async with asyncio.timeout(WITHIN):
        assert await asyncio.to_thread(str.upper, "done") == "DONE"
    hanging.go_on.set()


async def test_a_call_is_counted_once_it_has_hung_for_long_and_until_it_returns(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_threads, "STUCK_AFTER", 0.01)
    go_on, begun = threading.Event(), threading.Event()

    def call() -> None:
        begun.set()
        go_on.wait(WITHIN)

    hanging = asyncio.create_task(asyncio.to_thread(call))
    await until(begun.is_set)
    hanging.cancel()
    await until(lambda: threads.stuck == 1)

    go_on.set()
    await until(lambda: threads.stuck == 0)


async def test_a_call_that_returns_soon_after_it_was_given_up_is_never_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted: list[int] = []
    threads = Threads(counted.append)
    asyncio.get_running_loop().set_default_executor(LoopThreads(threads))
    monkeypatch.setattr(loop_threads, "STUCK_AFTER", 0.01)
    go_on, begun, over = threading.Event(), threading.Event(), threading.Event()

    def call() -> None:
        begun.set()
        go_on.wait(WITHIN)
        over.set()

    given_up = asyncio.create_task(asyncio.to_thread(call))
    await until(begun.is_set)
    go_on.set()
    await until(over.is_set)
    given_up.cancel()
    passed = asyncio.Event()
    asyncio.get_running_loop().call_later(0.05, passed.set)
    await passed.wait()

    assert counted == []
    threads.close()


async def test_a_call_that_is_cancelled_before_it_begins_never_does(threads: Threads) -> None:
    hanging, begun = Hanging(), list[int]()
    calls = [asyncio.create_task(asyncio.to_thread(hanging)) for _ in range(MOST)]
    await until(lambda: hanging.begun == MOST)
    waiting = asyncio.create_task(asyncio.to_thread(begun.append, 1))
    await asyncio.sleep(0)  # so that it waits for a place
    waiting.cancel()
    hanging.go_on.set()
    async with asyncio.timeout(WITHIN):
        await asyncio.gather(*calls)
        await asyncio.to_thread(str.upper, "done")

    assert begun == []


async def test_a_call_gives_up_its_place_once(threads: Threads) -> None:
    executor, hanging = LoopThreads(threads), Hanging()
    calls = [executor.submit(hanging) for _ in range(MOST)]
    await until(lambda: hanging.begun == MOST)
    for _ in range(2):
        assert not calls[0].cancel()

    after = [executor.submit(hanging) for _ in range(2)]
    await until(lambda: hanging.begun == MOST + 1)

    assert [one.running() for one in after] == [True, False]
    hanging.go_on.set()
    await until(lambda: all(one.done() for one in after))
