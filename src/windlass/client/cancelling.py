"""Cancel many tasks, and report what became of each."""

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol
from uuid import UUID

from windlass.client.bulk import Answers, Verb
from windlass.client.finding import TaskFilters
from windlass.model.errors import StoreBusy, TaskNotFound, WindlassError
from windlass.model.task import CancelAnswer, TaskState
from windlass.service import backoff

BATCH = 500  # tasks cancelled at once
HELD_WITHIN = 5.0  # seconds; whoever holds a task for longer is told of
LONGEST_PAUSE = 0.5  # seconds between two looks at what is held

CANCELS: Mapping[TaskState, CancelAnswer] = {
    TaskState.SCHEDULED: CancelAnswer.CANCELLED,
    TaskState.BLOCKED: CancelAnswer.CANCELLED,
    TaskState.PENDING: CancelAnswer.CANCELLED,
    TaskState.CLAIMED: CancelAnswer.REQUESTED,
    TaskState.RUNNING: CancelAnswer.REQUESTED,
}


class CancelStore(Protocol):
    """What cancelling needs."""

    async def cancel_many(self, task_ids: Sequence[UUID], reason: str) -> list[CancelAnswer]:
        """Cancel tasks in one transaction, and answer in order."""


class CancelOptions(TaskFilters, total=False):
    """What `cancel_tasks(...)` takes besides the reason, for type checkers."""

    by: str | None
    dry_run: bool
    everything: bool


@dataclass(frozen=True, slots=True)
class CancelReport:
    """What became of tasks that were to be cancelled, or would become of them."""

    cancelled: list[str] = field(default_factory=list)
    requested: list[str] = field(default_factory=list)  # their workers were asked
    ended: list[str] = field(default_factory=list)  # before
    refused: dict[str, WindlassError] = field(default_factory=dict)

    def add(self, task_id: UUID, answer: CancelAnswer | WindlassError) -> None:
        """Note what became of one."""
        match answer:
            case CancelAnswer.CANCELLED:
                self.cancelled.append(str(task_id))
            case CancelAnswer.REQUESTED:
                self.requested.append(str(task_id))
            case CancelAnswer.ENDED:
                self.ended.append(str(task_id))
            case WindlassError() as error:
                self.refused[str(task_id)] = error


def cancelling(store: CancelStore, reason: str) -> Verb[CancelAnswer]:
    """Return what cancels tasks for this reason."""
    return Verb(CANCELS, partial(_cancel, store, reason), otherwise=CancelAnswer.ENDED)


async def _cancel(store: CancelStore, reason: str, chosen: Sequence[UUID]) -> Answers[CancelAnswer]:
    """Cancel many at once; what is held is asked for again after all others, all of it together."""
    left, turn, until = chosen, 0, math.inf
    asking = _Asking(store, reason)
    while left:
        is_last = time.monotonic() >= until
        held: list[UUID] = []
        for start in range(0, len(left), BATCH):
            batch = left[start : start + BATCH]
            for task_id, answer in zip(batch, await asking.ask(batch), strict=True):
                if answer is CancelAnswer.HELD and not is_last:
                    held.append(task_id)
                else:
                    yield task_id, _told(task_id, answer)
        if turn == 0:
            until = time.monotonic() + HELD_WITHIN
        elif held:  # the first time at once: most were moved, and not held
            await asyncio.sleep(backoff(turn, longest=LONGEST_PAUSE))
        left, turn = held, turn + 1


class _Asking:
    """Asks for batches, and for parts of one in which something else of a task is held, or a table."""

    def __init__(self, store: CancelStore, reason: str) -> None:
        self._store = store
        self._reason = reason
        self._part_until: float | None = None  # whoever holds a table would hold each part

    async def ask(self, batch: Sequence[UUID]) -> list[CancelAnswer]:
        try:
            return await self._store.cancel_many(batch, self._reason)
        except StoreBusy:
            now = time.monotonic()
        if self._part_until is None:
            self._part_until = now + HELD_WITHIN
        if len(batch) == 1 or now > self._part_until:
            return [CancelAnswer.HELD] * len(batch)
        middle = len(batch) // 2
        return [*(await self.ask(batch[:middle])), *(await self.ask(batch[middle:]))]


def _told(task_id: UUID, answer: CancelAnswer) -> CancelAnswer | WindlassError:
    match answer:
        case CancelAnswer.HELD:
            return StoreBusy.of(task_id)
        case CancelAnswer.ABSENT:
            return TaskNotFound.of(task_id)
        case _:
            return answer
