"""Threads are used again, but nobody waits for one that is busy."""

import threading
import time
from collections.abc import Iterator

import pytest

from windlass.runtime.threads import Threads


@pytest.fixture
def threads() -> Iterator[Threads]:
    threads = Threads()
    yield threads
    threads.close()


def until_idle(threads: Threads) -> None:
    give_up_at = time.monotonic() + 10
    while not threads._idle:
        assert time.monotonic() < give_up_at
        time.sleep(0.001)  # a thread is idle a moment after its result is there


def test_a_thread_is_used_again(threads: Threads) -> None:
    first = threads.submit(threading.current_thread).result(10)
    until_idle(threads)

    assert threads.submit(threading.current_thread).result(10) is first


def test_a_call_does_not_wait_for_a_thread_that_is_busy(threads: Threads) -> None:
    threads.submit(lambda: None).result(10)
    until_idle(threads)
    both = threading.Barrier(2)

    calls = [threads.submit(lambda: both.wait(10)) for _ in range(2)]

    assert sorted(call.result(10) for call in calls) == [0, 1]


def test_what_a_call_raises_reaches_whoever_waits(threads: Threads) -> None:
    def leave() -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        threads.submit(leave).result(10)


def test_closed_threads_end(threads: Threads) -> None:
    both = threading.Barrier(2)

    def meet() -> threading.Thread:
        both.wait(10)
        return threading.current_thread()

    calls = [threads.submit(meet) for _ in range(2)]
    used = {call.result(10) for call in calls}
    threads.close()
    for thread in used:
        thread.join(10)

    assert len(used) == 2
    assert not any(thread.is_alive() for thread in used)
