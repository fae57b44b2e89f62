"""Do one thing to many tasks, named by id or by filter; or only say what would be done."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from uuid import UUID

import click

from windlass.app import App
from windlass.client import Handle
from windlass.model.errors import WindlassError, WrongState
from windlass.model.task import TaskFilter, TaskRecord, TaskState

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
            chosen = [record.id for record in await _all(app, wanted)]
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


async def _all(app: App, wanted: TaskFilter) -> list[TaskRecord]:
    """Every task of a filter, page by page, before anything is done to them."""
    store = await app.store()
    found: list[TaskRecord] = []
    while True:
        before = UUID(found[-1].id) if found else None
        page = await store.tasks(replace(wanted, before=before, limit=PAGE))
        found += page
        if len(page) < PAGE:
            return found
