"""Single tasks that are enqueued at the same time go together, and each is answered for itself."""

import asyncio
import contextvars
from collections.abc import AsyncIterator, Sequence
from copy import copy
from uuid import UUID

import pytest

from windlass.client import gathering
from windlass.client.gathering import Gatherer
from windlass.model.errors import PayloadError, StoreUnavailable
from windlass.model.task import Enqueued, NewTask


def task(number: int, payload: str = "{}") -> NewTask:
    return NewTask(UUID(int=number), "resize", payload)


class Writes:
    """A store that answers when the test says so."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.repeated: list[bool] = []
        self.bad: set[int] = set()
        self.error: Exception | None = None
        self.may_answer = asyncio.Event()

    async def __call__(self, tasks: Sequence[NewTask], *, repeated: bool) -> list[Enqueued]:
        numbers = [task.id.int for task in tasks]
        self.calls.append(numbers)
        self.repeated.append(repeated)
        await self.may_answer.wait()
        if self.error is not None:
            raise copy(self.error)
        if self.bad & {*numbers}:
            raise PayloadError("one of them is bad")
        return [Enqueued(task.id, created=True) for task in tasks]


@pytest.fixture
async def writes() -> AsyncIterator[Writes]:
    writes = Writes()
    yield writes
    writes.may_answer.set()


@pytest.fixture
def gatherer(writes: Writes, monkeypatch: pytest.MonkeyPatch) -> Gatherer:
    monkeypatch.setattr(gathering, "AT_ONCE", 1)
    return Gatherer(writes)


async def started(gatherer: Gatherer, *tasks: NewTask) -> list[asyncio.Task[Enqueued]]:
    """Begin to add these, as far as that goes before the store answers."""
    adding = [asyncio.create_task(gatherer.add(task)) for task in tasks]
    for _ in range(3):
        await asyncio.sleep(0)
    return adding


async def test_a_task_that_comes_alone_goes_at_once(gatherer: Gatherer, writes: Writes) -> None:
    adding = gatherer.add(task(1))
    adding.send(None)  # as far as it goes without anybody else

    assert writes.calls == [[1]]
    adding.close()


async def test_tasks_that_come_meanwhile_go_together_in_their_order(
    gatherer: Gatherer, writes: Writes
) -> None:
    adding = await started(gatherer, *map(task, range(1, 8)))
    writes.may_answer.set()

    answers = await asyncio.gather(*adding)

    assert writes.calls == [[1], [2, 3, 4, 5, 6, 7]]
    assert answers == [Enqueued(UUID(int=n), created=True) for n in range(1, 8)]


async def test_who_comes_while_one_call_is_under_way_does_not_wait_for_its_end(
    writes: Writes,
) -> None:
    gatherer = Gatherer(writes)
    adding = await started(gatherer, task(1), task(2))

    assert writes.calls == [[1], [2]]
    adding += await started(gatherer, task(3), task(4))
    assert writes.calls == [[1], [2]]
    writes.may_answer.set()
    await asyncio.gather(*adding)
    assert writes.calls == [[1], [2], [3, 4]]


async def test_one_that_is_refused_fails_alone(gatherer: Gatherer, writes: Writes) -> None:
    writes.bad = {5}
    adding = await started(gatherer, *map(task, range(1, 8)))
    writes.may_answer.set()

    answers = await asyncio.gather(*adding, return_exceptions=True)

    assert isinstance(answers.pop(4), PayloadError)
    assert answers == [Enqueued(UUID(int=n), created=True) for n in (1, 2, 3, 4, 6, 7)]
    # Nobody knows whether the call that failed was the only one: its connection may have broken.
    assert writes.repeated == [False, False, *[True] * (len(writes.calls) - 2)]


async def test_a_store_that_is_away_is_told_to_each_in_an_error_of_its_own(
    gatherer: Gatherer, writes: Writes
) -> None:
    writes.error = StoreUnavailable("gone")
    adding = await started(gatherer, *map(task, range(1, 5)))
    writes.may_answer.set()

    errors = await asyncio.gather(*adding, return_exceptions=True)

    assert [str(error) for error in errors] == ["gone"] * 4
    assert {type(error) for error in errors} == {StoreUnavailable}
    assert len({id(error) for error in errors}) == 4
    assert writes.calls == [[1], [2, 3, 4]]


async def test_one_that_is_cancelled_before_it_was_sent_is_not_sent(
    gatherer: Gatherer, writes: Writes
) -> None:
    adding = await started(gatherer, *map(task, range(1, 5)))
    adding[2].cancel()
    await asyncio.wait([adding[2]])
    writes.may_answer.set()

    answers = await asyncio.gather(*adding, return_exceptions=True)

    assert isinstance(answers[2], asyncio.CancelledError)
    assert writes.calls == [[1], [2, 4]]


async def test_one_that_is_cancelled_after_it_was_sent_leaves_the_others(writes: Writes) -> None:
    gatherer = Gatherer(writes)
    adding = await started(gatherer, *map(task, range(1, 5)))
    assert writes.calls == [[1], [2, 3, 4]]
    for cancelled in (adding[0], adding[2]):
        cancelled.cancel()
    await asyncio.wait([adding[0], adding[2]])
    writes.may_answer.set()

    answers = await asyncio.gather(*adding[1::2])

    assert answers == [Enqueued(UUID(int=n), created=True) for n in (2, 4)]
    assert await gatherer.add(task(5)) == Enqueued(UUID(int=5), created=True)
    assert writes.calls == [[1], [2, 3, 4], [5]]


async def test_a_group_has_its_limits(
    gatherer: Gatherer, writes: Writes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathering, "GROUP_TASKS", 3)
    monkeypatch.setattr(gathering, "GROUP_BYTES", 10)
    small = [task(n) for n in range(1, 6)]
    adding = await started(gatherer, *small, task(6, "{ 8 bytes}"), task(7, "{" * 20), task(8))
    writes.may_answer.set()

    await asyncio.gather(*adding)

    assert writes.calls == [[1], [2, 3, 4], [5], [6], [7], [8]]


async def test_closing_waits_until_all_are_answered(gatherer: Gatherer, writes: Writes) -> None:
    adding = await started(gatherer, *map(task, range(1, 4)))
    closing = asyncio.create_task(gatherer.close())
    await asyncio.sleep(0)
    writes.may_answer.set()
    await adding[0]

    await closing

    assert writes.calls == [[1], [2, 3]]
    await asyncio.sleep(0)  # until they have heard of it
    assert all(one.done() for one in adding)


def test_whoever_waits_when_the_event_loop_ends_is_cancelled() -> None:
    async def wait() -> None:
        gatherer = Gatherer(Writes())
        waiting.extend(await started(gatherer, task(1), task(2), task(3)))

    waiting: list[asyncio.Task[Enqueued]] = []
    asyncio.run(wait())

    assert [one.cancelled() for one in waiting] == [True] * 3


async def test_a_group_that_nobody_waits_for_any_more_holds_up_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gathering, "AT_ONCE", 1)
    calls: list[list[int]] = []
    go_on = asyncio.Event()

    async def write(tasks: Sequence[NewTask], *, repeated: bool) -> list[Enqueued]:
        calls.append([task.id.int for task in tasks])
        if len(tasks) == 2:
            await asyncio.Event().wait()  # the store is silent
        await go_on.wait()
        return [Enqueued(task.id, created=not repeated) for task in tasks]

    gatherer = Gatherer(write)
    first = await started(gatherer, task(1))
    group = await started(gatherer, task(2), task(3))
    go_on.set()
    await asyncio.gather(*first)
    later = await started(gatherer, task(4))
    group[0].cancel()
    await asyncio.sleep(0)
    calls_before = list(calls)
    group[1].cancel()
    async with asyncio.timeout(10):
        await asyncio.gather(*later)

    assert calls_before == [[1], [2, 3]]
    assert calls == [[1], [2, 3], [4]]


async def test_a_group_is_written_in_no_context_of_a_caller(writes: Writes) -> None:
    of_a_caller: contextvars.ContextVar[str] = contextvars.ContextVar("of_a_caller", default="")
    seen: list[str] = []

    async def write(tasks: Sequence[NewTask], *, repeated: bool) -> list[Enqueued]:
        if len(tasks) > 1:
            seen.append(of_a_caller.get())
        return await writes(tasks, repeated=repeated)

    gatherer = Gatherer(write)
    first = await started(gatherer, task(1))
    of_a_caller.set("a request")
    others = await started(gatherer, task(2), task(3), task(4))
    writes.may_answer.set()
    await asyncio.gather(*first, *others)

    assert set(seen) == {""}
