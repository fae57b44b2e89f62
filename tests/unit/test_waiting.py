"""Waiting for results: at once for what has ended, one look for all that has not."""

import asyncio
from collections.abc import Sequence
from typing import Any, cast
from uuid import UUID

import pytest

from windlass.client import results
from windlass.client.results import ResultWaiter
from windlass.model.errors import StoreUnavailable
from windlass.model.task import Ended, TaskState

FIRST, SECOND, THIRD = (UUID(int=number) for number in (1, 2, 3))


class Looked:
    """A store that only knows which tasks have ended, and what it was asked."""

    def __init__(self) -> None:
        self.done: set[UUID] = set()
        self.asked: list[set[UUID]] = []
        self.errors: list[Exception] = []

    async def ended(self, task_ids: Sequence[UUID]) -> tuple[list[Ended], list[UUID]]:
        self.asked.append(set(task_ids))
        await asyncio.sleep(0)
        if self.errors:
            raise self.errors.pop()
        found = [one for one in task_ids if one in self.done]
        return [Ended(one, TaskState.COMPLETED, None, None) for one in found], []


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
    while not store.asked:
        await asyncio.sleep(0)

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
    while not store.asked:
        await asyncio.sleep(0)
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
