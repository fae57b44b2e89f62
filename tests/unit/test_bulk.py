"""What is done to many tasks: one that is held costs no other."""

import asyncio
import time
from collections.abc import Sequence
from types import SimpleNamespace
from uuid import UUID

import pytest

from windlass.client import cancelling
from windlass.client.bulk import AT_ONCE, one_by_one
from windlass.client.cancelling import BATCH, _Asking
from windlass.model.errors import StoreBusy
from windlass.model.task import CancelAnswer

IDS = [UUID(int=number) for number in range(BATCH)]


class _Held:
    """A store in which something of one task is held, so that no call with it is answered."""

    def __init__(self, held: UUID) -> None:
        self._held = held

    async def cancel_many(self, task_ids: Sequence[UUID], reason: str) -> list[CancelAnswer]:
        if self._held in task_ids:
            raise StoreBusy("held")
        return [CancelAnswer.CANCELLED] * len(task_ids)


async def test_what_is_held_of_one_task_keeps_none_of_its_batch_from_being_cancelled() -> None:
    answers = await _Asking(_Held(IDS[123]), "no longer needed").ask(IDS)

    assert answers.pop(123) is CancelAnswer.HELD
    assert answers == [CancelAnswer.CANCELLED] * (BATCH - 1)


class _Locked:
    """A store with a table that somebody holds."""

    asked = 0

    async def cancel_many(self, task_ids: Sequence[UUID], reason: str) -> list[CancelAnswer]:
        self.asked += 1
        raise StoreBusy("held")


async def test_of_what_is_held_as_a_whole_parts_are_asked_for_only_so_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = _Locked()
    asking = _Asking(store, "no longer needed")
    assert await asking.ask(IDS[:4]) == [CancelAnswer.HELD] * 4
    assert store.asked == 1 + 2 + 4

    now = time.monotonic() + cancelling.HELD_WITHIN
    monkeypatch.setattr(cancelling, "time", SimpleNamespace(monotonic=lambda: now))
    assert await asking.ask(IDS) == [CancelAnswer.HELD] * BATCH
    assert store.asked == 7 + 1


async def test_a_few_are_waited_for_together_and_answered_in_order() -> None:
    begun: list[UUID] = []
    all_begun = asyncio.Event()

    async def change(task_id: UUID) -> str:
        begun.append(task_id)
        if len(begun) == AT_ONCE:
            all_begun.set()
        await all_begun.wait()
        if task_id == IDS[3]:
            raise StoreBusy("held")
        return f"changed {task_id.int}"

    async with asyncio.timeout(10):
        answers = [answer async for answer in one_by_one(change, IDS[: AT_ONCE + 2])]

    assert [task_id for task_id, _ in answers] == IDS[: AT_ONCE + 2]
    assert isinstance(answers.pop(3)[1], StoreBusy)
    assert all(answer == f"changed {task_id.int}" for task_id, answer in answers)
