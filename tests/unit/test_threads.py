"""Threads are used again, but nobody waits for one that is busy."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import pytest

from windlass.runtime.threads import Threads

WITHIN = 10.0  # seconds


@pytest.fixture
async def threads() -> AsyncIterator[Threads]:
    threads = Threads()
    yield threads
    threads.close()


async def run(threads: Threads, *calls: Callable[[], Any]) -> list[Any]:
    async with asyncio.timeout(WITHIN):
        submitted = [threads.submit(call) for call in calls]
        return [await each.answer for each in submitted]


async def test_a_thread_is_used_again(threads: Threads) -> None:
    (first,) = await run(threads, threading.current_thread)
    (second,) = await run(threads, threading.current_thread)

    assert second is first


async def test_calls_that_were_given_up_are_counted_until_they_return(threads: Threads) -> None:
    go_on = threading.Event()
    told: list[int] = []
    threads._tell_stuck = told.append
    began = [threading.Event() for _ in range(2)]

    def wait(number: int) -> None:
        began[number].set()
        go_on.wait(WITHIN)

    for number in range(2):
        hung = threads.submit(partial(wait, number))
        await asyncio.to_thread(began[number].wait, WITHIN)
        hung.answer.cancel()
        threads.give_up(hung)
    over = threads.submit(go_on.is_set)
    await over.answer
    threads.give_up(over)
    assert (threads.stuck, told) == (2, [1, 2])

    go_on.set()
    async with asyncio.timeout(WITHIN):
        while threads.stuck:
            await asyncio.sleep(0.01)


async def test_one_that_was_given_up_before_it_began_is_not_counted(threads: Threads) -> None:
    never = threads.submit(threading.current_thread)
    never.answer.cancel()
    threads.give_up(never)
    await run(threads, *[threading.current_thread] * 3)

    assert threads.stuck == 0


async def test_calls_that_return_at_once_share_threads(threads: Threads) -> None:
    used = await run(threads, *[threading.current_thread] * 1000)

    assert len(set(used)) < 100


@pytest.mark.parametrize("number", [2, 50])
async def test_a_call_does_not_wait_for_a_thread_that_is_busy(
    threads: Threads, number: int
) -> None:
    await run(threads, threading.current_thread)
    together = threading.Barrier(number)

    met = await run(threads, *[lambda: together.wait(WITHIN)] * number)

    assert sorted(met) == list(range(number))


async def test_a_call_does_not_wait_although_a_thread_seemed_to_be_free(threads: Threads) -> None:
    began, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        began.set()
        go_on.wait(WITHIN)

    first = threads.submit(wait)
    await asyncio.to_thread(began.wait, WITHIN)
    threads._crew.free += 1  # as if it had taken its work and not said so yet
    second = threads.submit(lambda: 2)
    threads._crew.free -= 1
    async with asyncio.timeout(WITHIN / 2):
        answer = await second.answer
    go_on.set()
    await first.answer

    assert answer == 2


async def test_there_are_no_more_threads_than_are_needed(threads: Threads) -> None:
    together = threading.Barrier(10)
    await run(threads, *[lambda: together.wait(WITHIN)] * 10)
    await run(threads, *[threading.current_thread] * 10)
    threads._grow()

    assert threads._crew.started <= 16


async def test_what_a_call_raises_reaches_whoever_waits(threads: Threads) -> None:
    def leave() -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        await run(threads, leave)


@pytest.mark.parametrize("error", [StopIteration, GeneratorExit])
async def test_what_nobody_could_wait_for_is_another_error(
    threads: Threads, error: type[BaseException]
) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(RuntimeError, match=error.__name__):
        await run(threads, fail)


async def test_a_call_that_was_given_up_before_it_began_is_not_run(threads: Threads) -> None:
    go_on, ran = threading.Event(), []
    first = threads.submit(lambda: go_on.wait(WITHIN))
    second = threads.submit(lambda: ran.append(2))
    second.answer.cancel()
    go_on.set()
    await first.answer
    await run(threads, lambda: ran.append(3))

    assert ran == [3]
    assert second.thread == 0
    assert second.thread == 0


async def test_a_call_that_was_given_up_while_it_ran_disturbs_nobody(threads: Threads) -> None:
    began, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        began.set()
        go_on.wait(WITHIN)

    given_up = threads.submit(wait)
    await asyncio.to_thread(began.wait, WITHIN)
    given_up.answer.cancel()
    was_over = given_up.is_over
    await run(threads, lambda: None)
    go_on.set()
    async with asyncio.timeout(WITHIN):
        while not given_up.is_over:
            await asyncio.sleep(0.001)
    await run(threads, lambda: None)

    assert not was_over
    assert given_up.thread


async def test_answers_of_many_calls_come_together(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, told = asyncio.get_running_loop(), 0
    tell = loop.call_soon_threadsafe

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal told
        told += 1
        return tell(*arguments, **options)

    monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
    await run(threads, *[lambda: None] * 1000)

    assert told < 500


async def test_closed_threads_end(threads: Threads) -> None:
    both = threading.Barrier(2)

    def meet() -> threading.Thread:
        both.wait(WITHIN)
        return threading.current_thread()

    used = set(await run(threads, meet, meet))
    threads.close()
    for thread in used:
        thread.join(WITHIN)

    assert len(used) == 2
    assert not any(thread.is_alive() for thread in used)


async def test_what_is_submitted_to_closed_threads_is_run_though_others_are_stuck() -> None:
    threads = Threads()
    go_on, began = threading.Event(), threading.Event()

    def hang() -> None:
        began.set()
        go_on.wait(3 * WITHIN)

    both = threading.Barrier(2)
    stuck = threads.submit(hang)
    assert began.wait(WITHIN)
    threads.give_up(stuck)
    before = threads.submit(lambda: "before")  # and for a moment nobody looks for a thread

    threads.close()

    assert await run(threads, lambda: "after") == ["after"]
    assert await asyncio.wait_for(before.answer, WITHIN) == "before"
    assert sorted(await run(threads, *[lambda: both.wait(WITHIN)] * 2)) == [0, 1]
    go_on.set()
    threads.close()
