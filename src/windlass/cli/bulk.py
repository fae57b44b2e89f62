"""Do one thing to many tasks, named by id or by filter; or only say what would be done."""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import click

from windlass.app import App
from windlass.client import Handle, find_all
from windlass.model.errors import WindlassError, WrongState
from windlass.model.task import TaskFilter, TaskState


@dataclass(frozen=True, slots=True)
class Verb:
    """Something to do to a task."""

    does: Mapping[TaskState, str]  # what it does to tasks in the states that it is for
    do: Callable[[App, Handle], Awaitable[str]]  # returns what was done


async def act_on(app: App, verb: Verb, chosen: Sequence[str] | TaskFilter, *, dry_run: bool) -> int:
    """Do it to each task and print what was done; return for how many it was not possible.

    A filter that names no state means those that the verb is for.
    """
    failed = 0
    async with app:
        if isinstance(chosen, TaskFilter):
            wanted = replace(chosen, statuses=chosen.statuses or tuple(verb.does))
            chosen = [str(task_id) for task_id in await find_all(await app.store(), wanted)]
            if not chosen:
                say_nothing_fits(wanted.statuses)
        for handle in [app.handle(task_id) for task_id in chosen]:
            try:
                said = await (_foresee(verb, handle) if dry_run else verb.do(app, handle))
            except WindlassError as error:
                failed += 1
                click.echo(f"{handle.id} {error}", err=True)
            else:
                click.echo(f"{handle.id} {said}")
    return failed


def say_nothing_fits(statuses: Iterable[TaskState]) -> None:
    """Say that a filter has found nothing."""
    click.echo(f"no task that is {' or '.join(statuses)} fits the filter", err=True)


async def _foresee(verb: Verb, handle: Handle) -> str:
    status = (await handle.get()).status
    if status in verb.does:
        return f"would be {verb.does[status]}"
    raise WrongState(f"would be left alone: it is {status}, not {' or '.join(verb.does)}")
