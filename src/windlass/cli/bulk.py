"""Do one thing to many tasks, named by id or by filter; or only say what would be done."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import click

from windlass.app import App
from windlass.client import Handle
from windlass.model.errors import WindlassError, WrongState
from windlass.model.task import TaskFilter, TaskRecord, TaskState
from windlass.store.port import Store

PAGE = 500


@dataclass(frozen=True, slots=True)
class Verb:
    """Something to do to a task."""

    does: Mapping[TaskState, str]  # what it does to tasks in the states that it is for
    do: Callable[[App, Handle], Awaitable[str]]  # returns what was done
    otherwise: str | None = None  # what is said of a task in another state; None: an error


async def act_on(app: App, verb: Verb, chosen: Sequence[str] | TaskFilter, *, dry_run: bool) -> int:
    """Do it to each task and print what was done; return for how many it was not possible.

    A filter that names no state means those that the verb is for.
    """
    failed = 0
    async with app:
        if isinstance(chosen, TaskFilter):
            wanted = replace(chosen, statuses=chosen.statuses or tuple(verb.does))
            chosen = await _all(app, wanted)
            if not chosen:
                states = " or ".join(wanted.statuses)
                click.echo(f"no task that is {states} fits the filter", err=True)
        for handle in [app.handle(task_id) for task_id in chosen]:
            try:
                said = await (_foresee(verb, handle) if dry_run else verb.do(app, handle))
            except WindlassError as error:
                failed += 1
                click.echo(f"{handle.id} {error}", err=True)
            else:
                click.echo(f"{handle.id} {said}")
    return failed


async def _foresee(verb: Verb, handle: Handle) -> str:
    status = (await handle.get()).status
    if status in verb.does:
        return f"would be {verb.does[status]}"
    if verb.otherwise is None:
        raise WrongState(f"would be left alone: it is {status}, not {' or '.join(verb.does)}")
    return verb.otherwise


async def _all(app: App, wanted: TaskFilter) -> list[str]:
    """The id of every task of a filter, before anything is done to them.

    A task that moves from one place to another between two pages may be on both, or on none: all of
    them are read again until no task turns up that was there before.
    """
    store = await app.store()
    begun = await store.now()
    found: dict[str, None] = {}
    while True:
        new = [record async for record in _pages(store, wanted) if record.id not in found]
        found |= dict.fromkeys(record.id for record in new)
        if all(record.created_at >= begun for record in new):
            return list(found)


async def _pages(store: Store, wanted: TaskFilter) -> AsyncIterator[TaskRecord]:
    after = None
    while True:
        page = await store.tasks(replace(wanted, after=after, limit=PAGE))
        for record in page.records:
            yield record
        after = page.rest
        if after is None:
            return
