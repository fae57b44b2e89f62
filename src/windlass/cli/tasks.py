"""Commands on tasks: to look at them, and to act on what is found."""

from collections.abc import Sequence
from typing import Any
from uuid import UUID

import click
import msgspec

from windlass.app import App
from windlass.cli.bulk import PAGE, Verb, act_on
from windlass.cli.loading import app_option, json_option, load_lasting_app, run
from windlass.cli.options import Subcommands, parse_priority, parse_time, single_option
from windlass.cli.printing import print_json, print_table
from windlass.client import Handle, checked_change, checked_reason
from windlass.model.errors import ConfigurationError
from windlass.model.task import CancelAnswer, TaskFilter, TaskRecord, TaskState
from windlass.registry import checked_name

WAITING = (TaskState.SCHEDULED, TaskState.BLOCKED, TaskState.PENDING)
HELD = (TaskState.CLAIMED, TaskState.RUNNING)
UNSUCCESSFUL = (TaskState.FAILED, TaskState.DEAD, TaskState.CANCELLED)
ENDED = "had already ended"


class TaskCommands(Subcommands):
    """The commands on tasks."""

    not_built = frozenset({"explain", "history"})


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


def _filter(
    *,
    statuses: Sequence[str],
    type_name: str | None,
    in_queue: str | None,
    tag: str | None,
    since: str | None,
    until: str | None,
    limit: int = PAGE,
) -> TaskFilter:
    return TaskFilter(
        statuses=tuple(TaskState(status) for status in statuses),
        type=None if type_name is None else checked_name("--type", type_name),
        queue=None if in_queue is None else checked_name("--queue", in_queue),
        tag=None if tag is None else checked_name("--tag", tag),
        created_from=None if since is None else parse_time("--since", since),
        created_until=None if until is None else parse_time("--until", until),
        limit=limit,
    )


@click.group(cls=TaskCommands)
def tasks() -> None:
    """Look at tasks, cancel, retry or change them."""


@tasks.command("list")
@app_option
@_filtered
@single_option("--limit", type=click.IntRange(1, 10_000), default=50, show_default=True)
@json_option
def list_tasks(application: str | None, limit: int, as_json: bool, **wanted: Any) -> None:
    """List tasks, newest first."""
    records = run(_list(load_lasting_app(application), _filter(**wanted, limit=limit)))
    if as_json:
        print_json(records)
        return
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
    if len(records) == limit:
        click.echo(f"the newest {limit}; there may be more: give --limit", err=True)


async def _list(app: App, wanted: TaskFilter) -> list[TaskRecord]:
    async with app:
        return await (await app.store()).tasks(wanted)


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
        click.echo(f"{name + ':':<17}{value}")


def _fields(record: TaskRecord) -> list[tuple[str, Any]]:
    values: dict[str, Any] = msgspec.to_builtins(record)
    lines = []
    for name, value in values.items():
        if name == "errors":
            lines += [
                (f"attempt {error['attempt']}", f"{error['type']}: {error['message']}")
                for error in value
            ]
        elif value not in (None, ()):
            lines.append((name, value))
    return lines


async def _get(app: App, task_id: str) -> TaskRecord:
    async with app:
        return await app.handle(task_id).get()


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
def cancel_tasks(reason: str, **what: Any) -> None:
    """Cancel tasks, by id or by filter: waiting ones at once, others by asking their worker."""
    checked_reason(reason)

    async def cancel(app: App, handle: Handle) -> str:
        match await (await app.client()).cancel(UUID(handle.id), reason):
            case CancelAnswer.CANCELLED:
                return "cancelled"
            case CancelAnswer.REQUESTED:
                return "asked to stop; its worker ends it"
            case CancelAnswer.ENDED:
                return ENDED

    does = dict.fromkeys(WAITING, "cancelled") | dict.fromkeys(HELD, "asked to stop")
    _act(Verb(does, cancel, otherwise=ENDED), **what)


@tasks.command("retry")
@_bulk
def retry_tasks(**what: Any) -> None:
    """Reopen failed, dead or cancelled tasks, by id or by filter."""

    async def retry(_: App, handle: Handle) -> str:
        await handle.retry()
        return "reopened"

    _act(Verb(dict.fromkeys(UNSUCCESSFUL, "reopened"), retry), **what)


@tasks.command("change")
@_bulk
@single_option("--set-priority", "--priority", "priority", help="0 to 100, or a name.")
@single_option("--set-queue", "queue", help="The queue to move it to.")
@single_option("--at", metavar="TIME")
@single_option("--delay", type=float, metavar="SECONDS")
def change_tasks(
    priority: str | None, queue: str | None, at: str | None, delay: float | None, **what: Any
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

    async def change(app: App, handle: Handle) -> str:
        await (await app.client()).change(UUID(handle.id), wanted)
        return "changed"

    _act(Verb(dict.fromkeys(WAITING, "changed"), change), **what)


def _act(
    verb: Verb, *, application: str | None, task_ids: Sequence[str], dry_run: bool, **wanted: Any
) -> None:
    by_filter = any(wanted.values())
    if bool(task_ids) == by_filter:
        raise ConfigurationError("name tasks either by id or by filter")
    chosen = task_ids or _filter(**wanted)
    if run(act_on(load_lasting_app(application), verb, chosen, dry_run=dry_run)):
        raise click.exceptions.Exit(1)
