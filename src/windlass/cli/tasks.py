"""Commands on tasks: to look at them, and to act on what is found."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import click
import msgspec

from windlass.app import App
from windlass.cli.caller import caller
from windlass.cli.loading import app_option, json_option, load_lasting_app
from windlass.cli.options import Subcommands, parse_priority, parse_time, single_option
from windlass.cli.printing import legible, print_json, print_table
from windlass.cli.running import run
from windlass.client import (
    CANCELS,
    CHANGES,
    RETRIES,
    Answers,
    Chosen,
    Client,
    checked_cancellation,
    checked_change,
    checked_id,
)
from windlass.model.errors import ConfigurationError, WindlassError
from windlass.model.explanation import Explanation
from windlass.model.task import CancelAnswer, TaskFilter, TaskPage, TaskRecord, TaskState
from windlass.registry import checked_name

A = TypeVar("A")

BECAME = {
    CancelAnswer.CANCELLED: "cancelled",
    CancelAnswer.REQUESTED: "asked to stop; its worker ends it",
    CancelAnswer.ENDED: "had already ended",
}
WOULD_BE = BECAME | {
    CancelAnswer.CANCELLED: "would be cancelled",
    CancelAnswer.REQUESTED: "would be asked to stop",
}


class TaskCommands(Subcommands):
    """The commands on tasks."""

    not_built = frozenset({"history"})


def _filtered(function: Any) -> Any:
    options = (
        click.option(
            "--status",
            "statuses",
            multiple=True,
            type=click.Choice([str(one) for one in TaskState]),
        ),
        single_option("--type", "type_name"),
        single_option("--queue", "in_queue"),
        single_option("--tag"),
        single_option("--since", metavar="TIME", help="Created at or after."),
        single_option("--until", metavar="TIME", help="Created before."),
    )
    for option in reversed(options):
        function = option(function)
    return function


def task_filter(
    *,
    statuses: Sequence[str],
    type_name: str | None,
    in_queue: str | None,
    tag: str | None,
    since: str | None,
    until: str | None,
    after: str | None = None,
    limit: int = 50,
) -> TaskFilter:
    """Return the filter that was typed."""
    return TaskFilter(
        statuses=tuple(TaskState(status) for status in statuses),
        type=None if type_name is None else checked_name("--type", type_name),
        queue=None if in_queue is None else checked_name("--queue", in_queue),
        tag=None if tag is None else checked_name("--tag", tag),
        created_from=None if since is None else parse_time("--since", since),
        created_until=None if until is None else parse_time("--until", until),
        after=after,
        limit=limit,
    )


@click.group(cls=TaskCommands)
def tasks() -> None:
    """Look at tasks, cancel, retry or change them."""


@tasks.command("list")
@app_option
@_filtered
@single_option("--limit", type=click.IntRange(1, 10_000), default=50, show_default=True)
@single_option("--after", metavar="POSITION", help="Go on where a listing ended that named it.")
@json_option
def list_tasks(application: str | None, limit: int, as_json: bool, **wanted: Any) -> None:
    """List tasks, newest first."""
    page = run(list_pages(load_lasting_app(application), task_filter(**wanted, limit=limit)))
    if as_json:
        print_json(page.records)
    else:
        _print_records(page.records)
    if page.rest is None:
        return
    if len(page.records) < limit:
        click.echo(
            f"looked back to {page.looked_back_to:%Y-%m-%dT%H:%M:%SZ} only, and there are older "
            f"tasks: say with --since how far to look, or go on with --after {page.rest}",
            err=True,
        )
    else:
        click.echo(
            f"the first {limit}; there may be more: give --limit, or go on with "
            f"--after {page.rest}",
            err=True,
        )


def _print_records(records: Sequence[TaskRecord]) -> None:
    print_table(
        ("id", "type", "queue", "status", "attempts", "created"),
        [
            (
                record.id,
                record.type,
                record.queue,
                record.status,
                f"{record.attempts}/{record.max_attempts}",
                f"{record.created_at:%Y-%m-%d %H:%M:%S}",
            )
            for record in records
        ],
    )


async def list_pages(app: App, wanted: TaskFilter) -> TaskPage:
    """List as many as are wanted, from as many pages as it takes.

    A page that came to the end of its looking is the last one, unless it was said how far to look,
    or nothing was seen yet of the time that was asked for.
    """
    since, until = wanted.created_from, wanted.created_until
    found: dict[str, TaskRecord] = {}
    async with app:
        store = await app.store()
        while True:
            left = wanted.limit - len(found)
            page = await store.tasks(replace(wanted, limit=left))
            found |= {record.id: record for record in page.records}
            seen_to = page.looked_back_to
            is_far_enough = seen_to and not since and not (until and seen_to >= until)
            if len(found) >= wanted.limit or page.rest is None or is_far_enough:
                newest_first = sorted(found.values(), key=lambda record: record.id, reverse=True)
                return replace(page, records=newest_first)
            wanted = replace(wanted, after=page.rest)


@tasks.command("show")
@app_option
@click.argument("task_id", metavar="ID")
@json_option
def show_task(application: str | None, task_id: str, as_json: bool) -> None:
    """Show one task with everything that is known of it."""
    record = run(_get(load_lasting_app(application), task_id))
    if as_json:
        print_json([record])
        return
    for name, value in _fields(record):
        click.echo(f"{name + ':':<17}{legible(str(value))}")


def _fields(record: TaskRecord) -> list[tuple[str, Any]]:
    values: dict[str, Any] = msgspec.to_builtins(record)
    lines = []
    for name, value in values.items():
        if name == "errors":
            lines += [(f"attempt {error['attempt']}", said_of(error)) for error in value]
        elif value not in (None, ()):
            lines.append((name, value))
    return lines


def said_of(error: dict[str, Any]) -> str:
    """One failed attempt in a line: the class of its error, type and message."""
    return f"{error.get('class', 'unknown')}: {error['type']}: {error['message']}"


async def _get(app: App, task_id: str) -> TaskRecord:
    async with app:
        return await app.handle(task_id).get()


@tasks.command("explain")
@app_option
@click.argument("task_id", metavar="ID")
@json_option
def explain_task(application: str | None, task_id: str, as_json: bool) -> None:
    """Say why a task is not running: every reason, the most decisive first."""
    explanation = run(_explain(load_lasting_app(application), task_id))
    if as_json:
        print_json(_plain(explanation))
        return
    for line in str(explanation).splitlines():
        click.echo(legible(line))


async def _explain(app: App, task_id: str) -> Explanation:
    async with app:
        return await app.handle(task_id).explain()


def _plain(explanation: Explanation) -> dict[str, Any]:
    """The fields of each reason, with its name and its sentence."""
    plain: dict[str, Any] = msgspec.to_builtins(explanation)
    plain["reasons"] = [
        {"reason": reason.kind, "text": str(reason), **msgspec.to_builtins(reason)}
        for reason in explanation.reasons
    ]
    return plain


def _bulk(function: Any) -> Any:
    options = (
        app_option,
        click.argument("task_ids", metavar="[ID]...", nargs=-1),
        _filtered,
        click.option("--dry-run", is_flag=True, help="Only say which tasks it would be."),
    )
    for option in reversed(options):
        function = option(function)
    return function


@tasks.command("cancel")
@_bulk
@single_option("--reason", default="cancelled on request", show_default=True)
@single_option("--by", help="Who asks for it.  [default: you, as user@host]")
def cancel_tasks(reason: str, by: str | None, dry_run: bool, **what: Any) -> None:
    """Cancel tasks, by id or by filter: waiting ones at once, others by asking their worker."""
    wanted = checked_cancellation(reason, caller() if by is None else by)

    def cancel(client: Client, chosen: Chosen) -> Answers[CancelAnswer]:
        return client.cancel_all(chosen, wanted, dry_run=dry_run)

    said = WOULD_BE if dry_run else BECAME
    _act(cancel, said.__getitem__, tuple(CANCELS), **what)


@tasks.command("retry")
@_bulk
def retry_tasks(dry_run: bool, **what: Any) -> None:
    """Reopen failed, dead or cancelled tasks, by id or by filter."""

    def retry(client: Client, chosen: Chosen) -> Answers[str]:
        return client.retry_all(chosen, dry_run=dry_run)

    _act(retry, _would_be if dry_run else str, tuple(RETRIES), **what)


@tasks.command("change")
@_bulk
@single_option("--set-priority", "--priority", "priority", help="0 to 100, or a name.")
@single_option("--set-queue", "queue", help="The queue to move it to.")
@single_option("--at", metavar="TIME")
@single_option("--delay", type=float, metavar="SECONDS")
def change_tasks(
    priority: str | None,
    queue: str | None,
    at: str | None,
    delay: float | None,
    dry_run: bool,
    **what: Any,
) -> None:
    """Change waiting tasks, by id or by filter."""
    if priority is None and queue is None and at is None and delay is None:
        raise ConfigurationError("nothing to change; give --priority, --set-queue, --at or --delay")

    wanted = checked_change(
        priority=None if priority is None else parse_priority(priority),
        queue=queue,
        at=None if at is None else parse_time("--at", at),
        delay=delay,
    )

    def change(client: Client, chosen: Chosen) -> Answers[str]:
        return client.change_all(chosen, wanted, dry_run=dry_run)

    _act(change, _would_be if dry_run else str, tuple(CHANGES), **what)


def _would_be(said: str) -> str:
    return f"would be {said}"


def _act(
    do: Callable[[Client, Chosen], Answers[A]],
    say: Callable[[A], str],
    meant: Sequence[TaskState],
    *,
    application: str | None,
    task_ids: Sequence[str],
    **filters: Any,
) -> None:
    """Do it to the tasks that were named, and print what became of each."""
    chosen = _chosen(task_ids, filters)
    done, refused = run(_print_answers(load_lasting_app(application), do, say, chosen))
    if isinstance(chosen, TaskFilter) and not done + refused:
        states = " or ".join(chosen.statuses or meant)
        click.echo(f"no task that is {states} fits the filter", err=True)
    if refused:
        raise click.exceptions.Exit(1)


def _chosen(task_ids: Sequence[str], filters: Mapping[str, Any]) -> Chosen:
    if bool(task_ids) == any(filters.values()):
        raise ConfigurationError("name tasks either by id or by filter")
    return [checked_id(one) for one in task_ids] if task_ids else task_filter(**filters)


async def _print_answers(
    app: App,
    do: Callable[[Client, Chosen], Answers[A]],
    say: Callable[[A], str],
    chosen: Chosen,
) -> tuple[int, int]:
    """Return how many were done, and how many refused."""
    done = refused = 0
    async with app:
        async for task_id, answer in do(await app.client(), chosen):
            if isinstance(answer, WindlassError):
                refused += 1
                click.echo(f"{task_id} {answer}", err=True)
            else:
                done += 1
                click.echo(f"{task_id} {say(answer)}")
    return done, refused
