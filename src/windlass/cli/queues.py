"""Commands on queues."""

from dataclasses import asdict
from typing import cast

import click

from windlass.app import App
from windlass.cli.guessing import guess
from windlass.cli.limits import (
    change_rule,
    given_options,
    limit_options,
    reset_rule,
    rules_of,
    shown_json,
    shown_rule,
)
from windlass.cli.loading import app_option, json_option, load_lasting_app
from windlass.cli.options import single_option
from windlass.cli.printing import legible, print_json, print_table
from windlass.cli.running import run
from windlass.client import QueueOptions, lane_rule
from windlass.model.rule import RuleRecord, RuleScope
from windlass.model.task import QueueRecord, TaskState
from windlass.registry import checked_name


@click.group()
def queues() -> None:
    """Look at queues, pause and resume them, and limit their tasks."""


@queues.command("list")
@app_option
@json_option
def list_queues(application: str | None, as_json: bool) -> None:
    """List queues with live tasks, paused ones, and those with limits."""

    async def read(app: App) -> tuple[dict[str, QueueRecord], dict[str, RuleRecord]]:
        async with app:
            rules = await rules_of(app, RuleScope.QUEUE)
            known = {one.name: one for one in await (await app.store()).queues()}
        return {name: QueueRecord(name, False, {}, None) for name in rules} | known, rules

    found, rules = run(read(load_lasting_app(application)))
    records = [found[name] for name in sorted(found)]
    if as_json:
        print_json([asdict(one) | {"rule": shown_json(rules.get(one.name))} for one in records])
        return
    states = (
        *(TaskState.PENDING, TaskState.BLOCKED, TaskState.SCHEDULED),
        *(TaskState.CLAIMED, TaskState.RUNNING),
    )
    print_table(
        ("queue", "paused", *(str(state) for state in states), "limits"),
        [
            (
                record.name,
                "yes" if record.paused else "no",
                *(str(record.counts.get(state, 0)) for state in states),
                shown_rule(rules.get(record.name)),
            )
            for record in records
        ],
    )


@queues.command("pause")
@app_option
@click.argument("name")
def pause_queue(application: str | None, name: str) -> None:
    """Grant no more tasks of a queue; what runs goes on."""
    checked_name("queue", name)

    async def pause(app: App) -> bool:
        async with app:
            await app.queues.pause(name)
            return await _is_known(app, name)

    _warn_unless(run(pause(load_lasting_app(application))), name)
    click.echo(legible(f"queue '{name}' is paused; what runs goes on"))


@queues.command("resume")
@app_option
@click.argument("name")
def resume_queue(application: str | None, name: str) -> None:
    """Grant tasks of a queue again."""
    click.echo(legible(run(_resume(load_lasting_app(application), checked_name("queue", name)))))


@queues.command("limit")
@app_option
@click.argument("name")
@limit_options
@single_option("--ageing", help="seconds for each point of priority, or strict")
@single_option("--weight", help="its share among the queues of a worker")
def limit_queue(application: str | None, name: str, **typed: str | None) -> None:
    """Limit the tasks of a queue, instead of what code declares; none lifts a limit."""
    rule = lane_rule(RuleScope.QUEUE, name, cast("QueueOptions", given_options(**typed)))

    async def limit(app: App) -> tuple[str, bool]:
        async with app:
            return await change_rule(app, rule), await _is_known(app, name)

    said, is_known = run(limit(load_lasting_app(application)))
    _warn_unless(is_known, name)
    click.echo(legible(said))


@queues.command("reset")
@app_option
@click.argument("name")
def reset_queue(application: str | None, name: str) -> None:
    """Let what code declares of a queue stand again."""
    checked_name("queue", name)
    said = run(reset_rule(load_lasting_app(application), RuleScope.QUEUE, name))
    click.echo(legible(said))


async def _is_known(app: App, name: str) -> bool:
    """Whether tasks go to a queue unless they say otherwise, or a worker names it; no task is counted for that."""
    store = await app.store()
    if name in {"default", *(record.queue for record in await store.types())}:
        return True
    return any(name in (worker.queues or ()) for worker in await store.workers())


def _warn_unless(is_known: bool, name: str) -> None:
    if not is_known:
        said = (
            f"windlass: no registered type has the queue '{name}', and no worker serves it by name"
        )
        click.echo(legible(said), err=True)


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
