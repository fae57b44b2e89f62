"""Commands on dead letters: to search and look at them, to replay or discard what is found."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import IO, Any
from uuid import UUID

import click

from windlass.app import App
from windlass.cli.letter import letter_lines
from windlass.cli.loading import app_option, json_option, load_lasting_app
from windlass.cli.options import parse_time, single_option
from windlass.cli.printing import legible, print_json, print_table
from windlass.cli.running import run
from windlass.client import ReplayPlan, ReplayReport, checked_id, checked_plan, dead_filter
from windlass.encoding import decode_json
from windlass.model.dead import DEAD_STATES, DeadFilter, DeadLetter
from windlass.model.errors import ConfigurationError, WindlassError
from windlass.model.failure import ErrorClass

LONGEST_SHOWN = 60  # characters of an error in a list


@click.group()
def dead() -> None:
    """Search dead letters, which are failed and dead tasks; replay or discard them."""


def _filtered(function: Any) -> Any:
    options = (
        click.option(
            "--status",
            "statuses",
            multiple=True,
            type=click.Choice([str(one) for one in DEAD_STATES]),
        ),
        single_option("--type", "type_name"),
        single_option("--queue", "in_queue"),
        single_option(
            "--class", "error_class", type=click.Choice([str(one) for one in ErrorClass])
        ),
        single_option(
            "--error", metavar="PATTERN", help="A regular expression, in 'Type: message'."
        ),
        single_option("--since", metavar="TIME", help="Ended at or after."),
        single_option("--until", metavar="TIME", help="Ended before."),
    )
    for option in reversed(options):
        function = option(function)
    return function


def typed_filter(
    *,
    statuses: Sequence[str],
    type_name: str | None,
    in_queue: str | None,
    error_class: str | None,
    error: str | None,
    since: str | None,
    until: str | None,
) -> DeadFilter:
    """Return the filter that was typed."""
    return dead_filter(
        {
            "status": statuses or None,
            "type": type_name,
            "queue": in_queue,
            "error_class": error_class,
            "error": error,
            "ended_from": None if since is None else parse_time("--since", since),
            "ended_until": None if until is None else parse_time("--until", until),
        }
    )


@dead.command("list")
@app_option
@_filtered
@single_option("--limit", type=click.IntRange(1, 10_000), default=50, show_default=True)
@single_option("--after", metavar="POSITION", help="Go on where a listing ended that named it.")
@json_option
def list_dead(
    application: str | None, limit: int, after: str | None, as_json: bool, **wanted: Any
) -> None:
    """List dead letters, last ended first."""
    asked = replace(typed_filter(**wanted), limit=limit, after=after)
    letters, rest, looked_back_to = run(_list(load_lasting_app(application), asked))
    if as_json:
        print_json(letters)
    else:
        _print_letters(letters)
    if rest is None:
        return
    if looked_back_to is not None:
        click.echo(
            f"looked back to {looked_back_to:%Y-%m-%dT%H:%M:%SZ} only, and there are older letters: "
            f"say with --since how far to look, or go on with --after {rest}",
            err=True,
        )
    else:
        click.echo(
            f"the first {limit}; there may be more: give --limit, or go on with --after {rest}",
            err=True,
        )


async def _list(
    app: App, wanted: DeadFilter
) -> tuple[list[DeadLetter], str | None, datetime | None]:
    async with app:
        client = await app.client()
        found = await client.dead.find(wanted)
        looked_back_to = found.looked_back_to if len(found.ids) < wanted.limit else None
        return await client.dead.read(found.ids), found.rest, looked_back_to


def _print_letters(letters: Sequence[DeadLetter]) -> None:
    print_table(
        ("id", "type", "queue", "status", "class", "ended", "replays", "error"),
        [
            (
                letter.id,
                letter.type,
                letter.queue,
                letter.status,
                letter.error_class,
                f"{letter.completed_at:%Y-%m-%d %H:%M:%S}",
                str(len(letter.replayed_as)),
                _short(letter),
            )
            for letter in letters
        ],
    )


def _short(letter: DeadLetter) -> str:
    text = (letter.last_error or "").partition("\n")[0]
    said = text if letter.error_type is None else f"{letter.error_type}: {text}"
    return said if len(said) <= LONGEST_SHOWN else f"{said[:LONGEST_SHOWN]}…"


@dead.command("show")
@app_option
@click.argument("task_id", metavar="ID")
@json_option
def show_letter(application: str | None, task_id: str, as_json: bool) -> None:
    """Show one dead letter: what failed, each attempt, the payload, and its lineage."""
    letter = run(_get(load_lasting_app(application), task_id))
    if as_json:
        print_json([letter])
        return
    for line in letter_lines(letter):
        click.echo(legible(line))


async def _get(app: App, task_id: str) -> DeadLetter:
    async with app:
        return await app.dead.get(task_id)


@dead.command("export")
@app_option
@_filtered
@single_option("--output", metavar="FILE", help="Without it, to standard output.")
def export_dead(application: str | None, output: str | None, **wanted: Any) -> None:
    """Write dead letters as JSON Lines, first ended first."""
    asked = typed_filter(**wanted)
    app = load_lasting_app(application)
    if output is None:
        number = run(_export(app, asked, sys.stdout.buffer))
    else:
        try:
            number = run(_export_to(app, asked, Path(output)))
        except OSError as error:
            raise ConfigurationError(f"--output {output!r}: {error.strerror}") from error
    click.echo(f"{number} exported", err=True)


async def _export_to(app: App, wanted: DeadFilter, path: Path) -> int:
    async with app:
        # A filter that is wrong, or a database that is away, must not cost the file.
        await (await app.client()).dead.find(replace(wanted, limit=1))
        with path.open("wb") as file:
            return await _export(app, wanted, file)


async def _export(app: App, wanted: DeadFilter, file: IO[bytes]) -> int:
    number = 0
    async with app:
        async for lines in (await app.client()).dead.lines(wanted):
            file.write(lines)
            number += lines.count(b"\n")
    file.flush()
    return number


def _chosen(function: Any) -> Any:
    options = (
        app_option,
        click.argument("task_ids", metavar="[ID]...", nargs=-1),
        _filtered,
        click.option("--dry-run", is_flag=True, help="Only say which letters it would be."),
    )
    for option in reversed(options):
        function = option(function)
    return function


@dead.command("replay")
@_chosen
@click.option("--again", is_flag=True, help="Also what was replayed before.")
@single_option("--payload", metavar="JSON", help="Instead of its payload; for one letter.")
@click.option(
    "--set", "changes", multiple=True, metavar="NAME=JSON", help="Change an argument; repeatable."
)
@single_option("--rate", metavar="N/s", help="Spread them over time: 10/s, 100/m, 5/h.")
@single_option("--canary", type=int, metavar="N", help="Replay N, wait, go on if they fare well.")
@single_option(
    "--max-failures",
    type=float,
    metavar="PERCENT",
    default=0.0,
    show_default=True,
    help="Of the canary; if more fail again, the others stay.",
)
@single_option(
    "--canary-timeout",
    type=float,
    metavar="SECONDS",
    default=300.0,
    show_default=True,
    help="How long to wait for the canary.",
)
def replay_dead(
    *,
    application: str | None,
    task_ids: Sequence[str],
    dry_run: bool,
    again: bool,
    payload: str | None,
    changes: Sequence[str],
    rate: str | None,
    canary: int | None,
    max_failures: float,
    canary_timeout: float,
    **wanted: Any,
) -> None:
    """Make new tasks of dead letters, by id or by filter; the letters stay.

    By filter, of those that were not replayed yet.
    """
    plan = checked_plan(
        again=again,
        dry_run=dry_run,
        payload=None if payload is None else _parse_json("--payload", payload),
        changes=dict(_parse_change(text) for text in changes),
        rate=rate,
        canary=canary,
        max_failures=max_failures,
        canary_timeout=canary_timeout,
    )
    chosen = _named(task_ids, wanted)
    report = run(_replay(load_lasting_app(application), chosen, plan))
    done = "would be replayed" if dry_run else "replayed"
    click.echo(f"{len(report.replayed)} {done}", err=True)
    if report.stopped is not None:
        click.echo(f"stopped: {report.stopped}; {len(report.left)} were not replayed", err=True)
    if report.stopped is not None or report.refused:
        raise click.exceptions.Exit(1)


async def _replay(app: App, chosen: Sequence[UUID] | DeadFilter, plan: ReplayPlan) -> ReplayReport:
    def tell(task_id: UUID, outcome: str | WindlassError | None) -> None:
        if isinstance(outcome, WindlassError):
            click.echo(legible(f"{task_id} {outcome}"), err=True)
        else:
            said = "would be replayed" if outcome is None else f"replayed as {outcome}"
            click.echo(f"{task_id} {said}")

    async with app:
        return await (await app.client()).dead.replay(chosen, plan, tell)


@dead.command("discard")
@_chosen
def discard_dead(
    application: str | None, task_ids: Sequence[str], dry_run: bool, **wanted: Any
) -> None:
    """Remove dead letters for good, by id or by filter."""
    chosen = _named(task_ids, wanted)
    done = "would be discarded" if dry_run else "discarded"

    def tell(task_id: UUID, error: WindlassError | None) -> None:
        if error is None:
            click.echo(f"{task_id} {done}")
        else:
            click.echo(legible(f"{task_id} {error}"), err=True)

    async def discard(app: App) -> tuple[int, int]:
        async with app:
            verbs = (await app.client()).dead
            report = await verbs.discard(chosen, dry_run=dry_run, tell=tell)
            return len(report.discarded), len(report.refused)

    discarded, refused = run(discard(load_lasting_app(application)))
    click.echo(f"{discarded} {done}", err=True)
    if refused:
        raise click.exceptions.Exit(1)


def _named(task_ids: Sequence[str], wanted: dict[str, Any]) -> Sequence[UUID] | DeadFilter:
    if bool(task_ids) == any(wanted.values()):
        raise ConfigurationError("name dead letters either by id or by filter")
    return [checked_id(task_id) for task_id in task_ids] if task_ids else typed_filter(**wanted)


def _parse_change(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ConfigurationError(f"--set {text!r}: write it as NAME=JSON")
    return name, _parse_json(f"--set {name}", value)


def _parse_json(option: str, text: str) -> Any:
    try:
        return decode_json(text)
    except ValueError as error:
        raise ConfigurationError(f"{option} is not JSON: {error}") from None
