"""Commands on queues."""

from typing import Any

import click

from windlass.app import App
from windlass.cli.guessing import guess
from windlass.cli.loading import app_option, json_option, load_lasting_app
from windlass.cli.printing import legible, print_json, print_table
from windlass.cli.running import run
from windlass.model.task import TaskState
from windlass.registry import checked_name


@click.group()
def queues() -> None:
    """Look at queues, pause and resume them."""


@queues.command("list")
@app_option
@json_option
def list_queues(application: str | None, as_json: bool) -> None:
    """List queues with live tasks, and paused ones."""

    async def read(app: App) -> list[Any]:
        async with app:
            return list(await (await app.store()).queues())

    records = run(read(load_lasting_app(application)))
    if as_json:
        print_json(records)
        return
    states = (TaskState.PENDING, TaskState.SCHEDULED, TaskState.CLAIMED, TaskState.RUNNING)
    print_table(
        ("queue", "paused", *(str(state) for state in states)),
        [
            (
                record.name,
                "yes" if record.paused else "no",
                *(str(record.counts.get(state, 0)) for state in states),
            )
            for record in records
        ],
    )


@queues.command("pause")
@app_option
@click.argument("name")
def pause_queue(application: str | None, name: str) -> None:
    """Grant no more tasks of a queue; what runs goes on."""
    run(_pause(load_lasting_app(application), checked_name("queue", name)))
    click.echo(legible(f"queue '{name}' is paused; what runs goes on"))


@queues.command("resume")
@app_option
@click.argument("name")
def resume_queue(application: str | None, name: str) -> None:
    """Grant tasks of a queue again."""
    click.echo(legible(run(_resume(load_lasting_app(application), checked_name("queue", name)))))


async def _pause(app: App, name: str) -> None:
    async with app:
        await (await app.store()).pause(name)


async def _resume(app: App, name: str) -> str:
    """Resume a queue; return what is to be said of it."""
    async with app:
        store = await app.store()
        if await store.resume(name):
            return f"queue '{name}' is resumed"
        known = [queue.name for queue in await store.queues()]
    if name in known:
        return f"queue '{name}' was not paused"
    return f"queue '{name}' was not paused, and no task waits or runs in it{guess(name, known)}"
