"""Commands on workers."""

from typing import Any

import click

from windlass.app import App
from windlass.cli.loading import app_option, json_option, load_lasting_app
from windlass.cli.options import Subcommands
from windlass.cli.printing import print_json, print_table
from windlass.cli.running import run


class WorkerCommands(Subcommands):
    """The commands on workers."""

    not_built = frozenset({"drain"})


@click.group(cls=WorkerCommands)
def workers() -> None:
    """Look at workers."""


@workers.command("list")
@app_option
@json_option
def list_workers(application: str | None, as_json: bool) -> None:
    """List registered workers."""

    async def read(app: App) -> list[Any]:
        async with app:
            return list(await (await app.store()).workers())

    records = run(read(load_lasting_app(application)))
    if as_json:
        print_json(records)
        return
    print_table(
        ("id", "host", "pid", "running", "capacity", "heartbeat", "leader", "breakers"),
        [
            (
                record.id,
                record.host,
                str(record.pid),
                str(record.running),
                str(record.capacity),
                f"{record.heartbeat_at:%Y-%m-%d %H:%M:%S}",
                "yes" if record.leader else "no",
                _shown(record.breakers),
            )
            for record in records
        ],
    )


def _shown(breakers: dict[str, str]) -> str:
    """Those that hold something up."""
    return ", ".join(f"{name} {state}" for name, state in breakers.items() if state != "closed")
