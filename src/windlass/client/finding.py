"""Find tasks by filter: all of them, whatever moves meanwhile."""

from collections.abc import AsyncIterator, Collection
from dataclasses import replace
from datetime import datetime
from typing import Any, Protocol, TypedDict
from uuid import UUID

from windlass.client.asking import checked_time
from windlass.model.errors import ConfigurationError
from windlass.model.limits import shown
from windlass.model.task import TaskFilter, TaskPage, TaskRecord, TaskState
from windlass.registry import checked_flag, checked_name

PAGE = 500  # tasks found at once


class FindStore(Protocol):
    """How tasks are found."""

    async def tasks(self, wanted: TaskFilter) -> TaskPage:
        """List a page of tasks, as they are at one moment."""

    async def now(self) -> datetime:
        """Return the store's time."""


class TaskFilters(TypedDict, total=False):
    """How tasks are searched, for type checkers."""

    type: str | None
    queue: str | None
    tag: str | None
    status: str | Collection[str] | None
    created_from: datetime | None
    created_until: datetime | None


def task_filter(filters: TaskFilters, *, everything: bool) -> TaskFilter:
    """Check which tasks are meant; all of them only if that was said."""
    for name in filters:
        if name not in TaskFilters.__annotations__:
            known = ", ".join(TaskFilters.__annotations__)
            raise ConfigurationError(f"filter '{name}' is not known; filters are: {known}")
    kind, queue, tag = (filters.get(name) for name in ("type", "queue", "tag"))
    since, until = filters.get("created_from"), filters.get("created_until")
    wanted = TaskFilter(
        statuses=_checked_statuses(filters.get("status")),
        type=None if kind is None else checked_name("type", kind),
        queue=None if queue is None else checked_name("queue", queue),
        tag=None if tag is None else checked_name("tag", tag),
        created_from=None if since is None else checked_time("created_from", since),
        created_until=None if until is None else checked_time("created_until", until),
    )
    if checked_flag("everything", everything) != (wanted == TaskFilter()):
        raise ConfigurationError(
            "everything=True excludes a filter; leave one of them out"
            if everything
            else "no filter was given; say which tasks with type, queue, tag, status, created_from "
            "or created_until, or say everything=True"
        )
    return wanted


def _checked_statuses(value: Any) -> tuple[TaskState, ...]:
    if value is None:
        return ()
    try:
        wanted = tuple(map(TaskState, (value,) if isinstance(value, str) else value))
    except (ValueError, TypeError):
        wanted = ()
    if not wanted:  # none of them is not all of them
        known = ", ".join(TaskState)
        raise ConfigurationError(f"status {shown(value)}: use one of {known}, or a list of them")
    return wanted


async def find_all(store: FindStore, wanted: TaskFilter) -> dict[UUID, TaskState]:
    """Find every task of a filter, before anything is done to them, page by page.

    A task that moves from one place to another between two pages may be on both, or on none: all of
    them are read again until no task turns up that was there before.
    """
    begun = await store.now()
    found: dict[UUID, TaskState] = {}
    while True:
        new = [
            (UUID(record.id), record.status, record.created_at)
            async for record in _pages(store, wanted)
            if UUID(record.id) not in found
        ]
        found |= {task_id: status for task_id, status, _ in new}
        if all(created_at >= begun for _, _, created_at in new):
            return found


async def _pages(store: FindStore, wanted: TaskFilter) -> AsyncIterator[TaskRecord]:
    after = None
    while True:
        page = await store.tasks(replace(wanted, after=after, limit=PAGE))
        for record in page.records:
            yield record
        after = page.rest
        if after is None:
            return
