"""Commands on schedules."""

from datetime import datetime, timedelta

import click

from windlass.app import App
from windlass.cli.loading import app_option, json_option, load_lasting_app
from windlass.cli.printing import legible, print_json, print_table
from windlass.cli.running import run
from windlass.model.schedule import ScheduleRecord, SlotRecord
from windlass.policy.cron import parse_zone
from windlass.registry import checked_name


@click.group()
def schedules() -> None:
    """Look at schedules, pause, resume and run them."""


@schedules.command("list")
@app_option
@json_option
def list_schedules(application: str | None, as_json: bool) -> None:
    """List schedules with their next five slots, and what became of the last ones."""
    records = run(_list(load_lasting_app(application)))
    if as_json:
        print_json(records)
        return
    print_table(
        ("schedule", "task", "when", "paused", "last fired", "last skipped", "next"),
        [_row(record) for record in records],
    )


@schedules.command("pause")
@app_option
@click.argument("name")
def pause_schedule(application: str | None, name: str) -> None:
    """Fire no more slots of a schedule; what was enqueued goes on."""
    checked_name("schedule name", name)
    is_new = run(_pause(load_lasting_app(application), name))
    said = "is paused; its slots are skipped" if is_new else "was paused already"
    click.echo(legible(f"schedule '{name}' {said}"))


@schedules.command("resume")
@app_option
@click.argument("name")
def resume_schedule(application: str | None, name: str) -> None:
    """Fire the slots of a schedule from now on; those of the pause stay skipped."""
    checked_name("schedule name", name)
    was_paused = run(_resume(load_lasting_app(application), name))
    said = "is resumed" if was_paused else "was not paused"
    click.echo(legible(f"schedule '{name}' {said}"))


@schedules.command("run")
@app_option
@click.argument("name")
def run_schedule(application: str | None, name: str) -> None:
    """Enqueue the task of a schedule now; prints its id."""
    checked_name("schedule name", name)
    click.echo(run(_run(load_lasting_app(application), name)))


async def _list(app: App) -> list[ScheduleRecord]:
    async with app:
        return await app.schedules.list()


async def _pause(app: App, name: str) -> bool:
    async with app:
        return await app.schedules.pause(name)


async def _resume(app: App, name: str) -> bool:
    async with app:
        return await app.schedules.resume(name)


async def _run(app: App, name: str) -> str:
    async with app:
        return await app.schedules.run(name)


def _row(record: ScheduleRecord) -> tuple[str, ...]:
    every = None if record.every is None else timedelta(seconds=record.every)
    zone = record.timezone
    return (
        record.name,
        record.type,
        f"every {every}" if record.cron is None else f"{record.cron} ({zone})",
        "no" if record.paused_at is None else f"since {_shown(record.paused_at, zone)}",
        _slot(record.last_fired, zone),
        _slot(record.last_skipped, zone),
        ", ".join(_shown(slot, zone) for slot in record.next_slots),
    )


def _slot(slot: SlotRecord | None, zone: str) -> str:
    if slot is None:
        return "-"
    several = f" and {slot.slots - 1} before" if slot.slots > 1 else ""
    reason = f": {slot.reason}" if slot.reason else ""
    return f"{_shown(slot.slot_at, zone)}{several}{reason}"


def _shown(moment: datetime, zone: str) -> str:
    local = moment.astimezone(parse_zone(zone)).replace(microsecond=0)
    return local.isoformat(sep=" ")
