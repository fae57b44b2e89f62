"""Do one thing to many tasks, named by id or by filter; or only say what would become of each."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, Protocol, TypeVar
from uuid import UUID

from windlass.client.finding import FindStore, find_all
from windlass.model.errors import StoreBusy, TaskNotFound, WindlassError, WrongState
from windlass.model.task import Change, TaskFilter, TaskRecord, TaskState

A = TypeVar("A")

AT_ONCE = 10  # tasks, each in a transaction of its own

CHANGES = dict.fromkeys((TaskState.SCHEDULED, TaskState.BLOCKED, TaskState.PENDING), "changed")
RETRIES = dict.fromkeys((TaskState.FAILED, TaskState.DEAD, TaskState.CANCELLED), "reopened")

Chosen = Sequence[UUID] | TaskFilter
Answers = AsyncIterator[tuple[UUID, A | WindlassError]]  # what became of each, as it is known


class BulkStore(FindStore, Protocol):
    """How tasks are found and looked at."""

    async def get(self, task_id: UUID) -> TaskRecord:
        """Return the whole task or raise `TaskNotFound`."""


@dataclass(frozen=True, slots=True)
class Verb(Generic[A]):
    """Something to do to tasks."""

    does: Mapping[TaskState, A]  # what becomes of tasks in the states that it is for
    do: Callable[[Sequence[UUID]], Answers[A]]
    otherwise: A | None = None  # the answer for tasks in other states; None: they are refused

    def foresee(self, status: TaskState) -> A | WindlassError:
        """Say what would become of a task in this state."""
        answer = self.does.get(status, self.otherwise)
        if answer is None:
            wanted = " or ".join(self.does)
            return WrongState(f"would be left alone: it is {status}, not {wanted}")
        return answer


class ChangeStore(BulkStore, Protocol):
    """What changing and retrying need."""

    async def change(self, task_id: UUID, change: Change) -> None:
        """Change a task that waits; raise `WrongState` or `TaskNotFound`."""

    async def retry(self, task_id: UUID) -> None:
        """Reopen an ended, unsuccessful task as a new generation with fresh attempts."""


def changing(store: ChangeStore, change: Change) -> Verb[str]:
    """Return what changes tasks that wait."""

    async def do(task_id: UUID) -> str:
        await store.change(task_id, change)
        return "changed"

    return Verb(CHANGES, partial(one_by_one, do))


def retrying(store: ChangeStore) -> Verb[str]:
    """Return what reopens tasks that ended without success."""

    async def do(task_id: UUID) -> str:
        await store.retry(task_id)
        return "reopened"

    return Verb(RETRIES, partial(one_by_one, do))


async def act_on(store: BulkStore, verb: Verb[A], chosen: Chosen, *, dry_run: bool) -> Answers[A]:
    """Do it to tasks by id, or to those of a filter, and answer for each.

    A filter that names no state means those that the verb is for.
    """
    known: Mapping[UUID, TaskState] = {}
    if isinstance(chosen, TaskFilter):
        statuses = chosen.statuses or tuple(verb.does)
        known = await find_all(store, replace(chosen, statuses=statuses))
        chosen = list(known)
    task_ids = list(dict.fromkeys(chosen))

    async def foresee(task_id: UUID) -> A | WindlassError:
        return verb.foresee(known.get(task_id) or (await store.get(task_id)).status)

    async for answer in one_by_one(foresee, task_ids) if dry_run else verb.do(task_ids):
        yield answer


async def one_by_one(
    do: Callable[[UUID], Awaitable[A | WindlassError]], task_ids: Sequence[UUID]
) -> Answers[A]:
    """Do it to one task for itself, a few at a time: one that is held is waited for."""

    async def attempt(task_id: UUID) -> A | WindlassError:
        try:
            return await do(task_id)
        except (TaskNotFound, WrongState, StoreBusy) as error:  # of this one alone
            return error

    for start in range(0, len(task_ids), AT_ONCE):
        part = task_ids[start : start + AT_ONCE]
        for task_id, answer in zip(part, await asyncio.gather(*map(attempt, part)), strict=True):
            yield task_id, answer
