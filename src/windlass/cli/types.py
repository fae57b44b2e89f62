"""Commands on task types."""

from typing import Any

import click

from windlass.app import App
from windlass.cli.loading import app_option, json_option, load_lasting_app
from windlass.cli.options import single_option
from windlass.cli.printing import legible, print_json, print_table
from windlass.cli.running import run
from windlass.client import checked_reason
from windlass.registry import checked_name


@click.group()
def types() -> None:
    """Look at task types, stop and allow their retries."""


@types.command("list")
@app_option
@json_option
def list_types(application: str | None, as_json: bool) -> None:
    """List registered types, and those whose retries are stopped."""

    async def read(app: App) -> list[Any]:
        async with app:
            return list(await (await app.store()).types())

    records = run(read(load_lasting_app(application)))
    if as_json:
        print_json(records)
        return
    print_table(
        ("type", "queue", "priority", "attempts", "retries"),
        [
            (
                record.name,
                record.queue,
                str(record.priority),
                str(record.max_attempts),
                "yes"
                if record.retries_stopped_at is None
                else f"stopped at {record.retries_stopped_at:%Y-%m-%d %H:%M:%S}: "
                f"{record.retries_stopped_because}",
            )
            for record in records
        ],
    )


@types.command("stop-retries")
@app_option
@click.argument("name")
@single_option("--reason", default="stopped on request", show_default=True)
def stop_retries(application: str | None, name: str, reason: str) -> None:
    """Stop trying failed tasks of a type again: from now on, and those that wait for it."""
    checked_name("task name", name)
    checked_reason(reason)

    async def stop(app: App) -> tuple[int, bool]:
        async with app:
            known = {record.name for record in await (await app.store()).types()}
            return await app.stop_retries(name, reason), name in known

    buried, is_known = run(stop(load_lasting_app(application)))
    if not is_known:
        click.echo(legible(f"windlass: no worker has ever registered the type '{name}'"), err=True)
    click.echo(legible(f"retries of '{name}' are stopped; {buried} that waited for one are dead"))


@types.command("allow-retries")
@app_option
@click.argument("name")
def allow_retries(application: str | None, name: str) -> None:
    """Try failed tasks of a type again from now on."""
    checked_name("task name", name)

    async def allow(app: App) -> bool:
        async with app:
            return await app.allow_retries(name)

    was_stopped = run(allow(load_lasting_app(application)))
    said = "are allowed again" if was_stopped else "were not stopped"
    click.echo(legible(f"retries of '{name}' {said}"))
