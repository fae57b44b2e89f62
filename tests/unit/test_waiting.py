"""Waiting for results: at once for what has ended, one look for all that has not."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast
from uuid import UUID

import pytest

from windlass.client import results
from windlass.client.results import ResultWaiter
from windlass.model.errors import ConfigurationError, StoreUnavailable, TaskNotFound
from windlass.model.task import Ended, TaskState

FIRST, SECOND, THIRD = (UUID(int=number) for number in (1, 2, 3))


class Looked:
    """A store that only knows which tasks have ended, and what it was asked."""

    def __init__(self) -> None:
        self.done: set[UUID] = set()
        self.asked: list[set[UUID]] = []
        self.answered = 0
        self.unknown: set[UUID] = set()
        self.errors: list[Exception] = []
        self.beside: Callable[[], object] = lambda: None  # called before the answer is given

    async def ended(self, task_ids: Sequence[UUID]) -> tuple[list[Ended], list[UUID]]:
        self.asked.append(set(task_ids))
        await asyncio.sleep(0)
        if self.errors:
            raise self.errors.pop()
        found = [one for one in task_ids if one in self.done]
        self.beside()
        self.answered += 1
        ended = [Ended(one, TaskState.COMPLETED, None, None) for one in found]
        return ended, [one for one in task_ids if one in self.unknown]

    async def has_answered(self, times: int) -> None:
        async with asyncio.timeout(10):
            while self.answered < times:
                await asyncio.sleep(0)


@pytest.fixture
def store() -> Looked:
    return Looked()


@pytest.fixture
def waiter(store: Looked) -> ResultWaiter:
    return ResultWaiter(cast("Any", store))


@pytest.fixture
def hourly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "FIRST_LOOK", 3600.0)
    monkeypatch.setattr(results, "LONGEST_LOOK", 3600.0)


@pytest.mark.usefixtures("hourly")
async def test_a_task_that_has_ended_is_answered_without_a_pause(
    store: Looked, waiter: ResultWaiter
) -> None:
    store.done = {FIRST, SECOND}

    async with asyncio.timeout(10):
        assert (await waiter.wait(FIRST)).id == FIRST
        assert (await waiter.wait(FIRST)).id == FIRST
        assert (await waiter.wait(SECOND)).id == SECOND

    assert store.asked == [{FIRST}, {FIRST}, {SECOND}]
    await waiter.close()


@pytest.mark.usefixtures("hourly")
async def test_a_newcomer_is_looked_for_by_itself(store: Looked, waiter: ResultWaiter) -> None:
    store.done = {SECOND}
    slow = asyncio.create_task(waiter.wait(FIRST))
    await store.has_answered(1)

    async with asyncio.timeout(10):
        assert (await waiter.wait(SECOND)).id == SECOND

    assert store.asked == [{FIRST}, {SECOND}]
    assert not slow.done()
    slow.cancel()
    await waiter.close()


async def test_newcomers_do_not_keep_the_others_waiting(
    store: Looked, waiter: ResultWaiter
) -> None:
    store.done = {THIRD}
    early = asyncio.create_task(waiter.wait(FIRST))
    await store.has_answered(1)
    store.done.add(FIRST)

    async with asyncio.timeout(10):
        while not early.done():
            await waiter.wait(THIRD)

    assert (await early).id == FIRST
    await waiter.close()


async def test_many_are_looked_for_at_once(store: Looked, waiter: ResultWaiter) -> None:
    store.done = {FIRST, SECOND, THIRD}

    await asyncio.gather(*(waiter.wait(one) for one in (FIRST, SECOND, THIRD)))

    assert store.asked == [{FIRST, SECOND, THIRD}]
    await waiter.close()


async def test_an_outage_is_waited_for(
    store: Looked, waiter: ResultWaiter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "FIRST_LOOK", 0.001)
    monkeypatch.setattr(results, "LONGEST_LOOK", 0.001)
    store.errors = [StoreUnavailable("gone"), StoreUnavailable("gone")]
    store.done = {FIRST}

    async with asyncio.timeout(10):
        assert (await ResultWaiter(cast("Any", store)).wait(FIRST)).id == FIRST

    assert store.errors == []


async def test_an_error_of_any_other_kind_is_told_to_all_who_wait(
    store: Looked, waiter: ResultWaiter
) -> None:
    store.errors = [RuntimeError("no such table")]

    async with asyncio.timeout(10):
        told = await asyncio.gather(waiter.wait(FIRST), waiter.wait(SECOND), return_exceptions=True)

    assert [str(error) for error in told] == ["no such table"] * 2
    store.done = {FIRST}
    async with asyncio.timeout(10):
        assert (await waiter.wait(FIRST)).id == FIRST  # and the next one is looked for as ever
    await waiter.close()


async def test_a_task_that_is_not_there_is_told_to_who_waits_for_it(
    store: Looked, waiter: ResultWaiter
) -> None:
    store.unknown = {FIRST}

    async with asyncio.timeout(10):
        with pytest.raises(TaskNotFound, match=str(FIRST)):
            await waiter.wait(FIRST)

    await waiter.close()


async def test_all_who_wait_for_a_task_are_told(store: Looked, waiter: ResultWaiter) -> None:
    waiting = [asyncio.create_task(waiter.wait(FIRST)) for _ in range(3)]
    await store.has_answered(1)
    waiting[0].cancel()
    store.done = {FIRST}

    async with asyncio.timeout(10):
        assert [(await one).id for one in waiting[1:]] == [FIRST, FIRST]

    await waiter.close()


@pytest.mark.usefixtures("hourly")
async def test_who_comes_late_is_looked_for_as_often_as_who_came_first(
    store: Looked, waiter: ResultWaiter, monkeypatch: pytest.MonkeyPatch
) -> None:
    early = asyncio.create_task(waiter.wait(FIRST))
    await store.has_answered(1)  # the next look is in an hour

    monkeypatch.setattr(results, "FIRST_LOOK", 0.001)
    late = asyncio.create_task(waiter.wait(SECOND))
    await store.has_answered(2)
    store.done = {SECOND}

    async with asyncio.timeout(10):
        assert (await late).id == SECOND
    early.cancel()
    await waiter.close()


async def test_the_pause_grows_to_the_longest(
    store: Looked, waiter: ResultWaiter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "FIRST_LOOK", 0.001)
    monkeypatch.setattr(results, "LONGEST_LOOK", 0.002)
    waiting = asyncio.create_task(waiter.wait(FIRST))

    await store.has_answered(4)

    assert waiter._pause == 0.002
    waiting.cancel()
    await waiter.close()


async def test_nobody_looks_for_what_is_no_longer_waited_for(
    store: Looked, waiter: ResultWaiter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "FIRST_LOOK", 0.001)
    gone, staying = (asyncio.create_task(waiter.wait(one)) for one in (FIRST, SECOND))
    await store.has_answered(1)

    gone.cancel()
    await asyncio.wait([gone])
    await store.has_answered(store.answered + 2)

    assert store.asked[-1] == {SECOND}
    staying.cancel()
    await waiter.close()


async def test_who_gives_up_while_the_answer_comes_does_not_spoil_it_for_others(
    store: Looked, waiter: ResultWaiter
) -> None:
    gone, staying = (asyncio.create_task(waiter.wait(FIRST)) for _ in range(2))
    store.done = {FIRST}
    store.beside = gone.cancel

    async with asyncio.timeout(10):
        assert (await staying).id == FIRST

    await waiter.close()


@pytest.mark.usefixtures("hourly")
async def test_who_still_waits_at_the_end_is_told_and_nobody_looks_any_more(
    store: Looked, waiter: ResultWaiter
) -> None:
    waiting = asyncio.create_task(waiter.wait(FIRST))
    await store.has_answered(1)

    await waiter.close()

    with pytest.raises(ConfigurationError, match="closed"):
        await asyncio.wait_for(waiting, 10)
    assert [one for one in asyncio.all_tasks() if one.get_name() == "windlass-results"] == []
