"""Commands on task types."""

from dataclasses import asdict
from typing import cast

import click

from windlass.app import App
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
from windlass.cli.values import (
    Records,
    change_value,
    is_of_values,
    reset_value,
    shown_values,
    value_options,
    value_rules_of,
    values_json,
)
from windlass.client import QueueOptions, checked_reason, lane_rule
from windlass.model.errors import ConfigurationError
from windlass.model.limits import shown
from windlass.model.rule import RuleRecord, RuleScope
from windlass.model.task import TypeRecord
from windlass.registry import checked_name


@click.group()
def types() -> None:
    """Look at task types, pause and limit them, stop and allow their retries."""


@types.command("list")
@app_option
@json_option
def list_types(application: str | None, as_json: bool) -> None:
    """List registered types, and those that are paused or whose retries are stopped."""

    async def read(
        app: App,
    ) -> tuple[list[TypeRecord], dict[str, RuleRecord], dict[str, Records]]:
        async with app:
            known = await (await app.store()).types()
            return known, await rules_of(app, RuleScope.TYPE), await value_rules_of(app)

    records, rules, values = run(read(load_lasting_app(application)))
    if as_json:
        print_json(
            [
                asdict(one)
                | {
                    "rule": shown_json(rules.get(one.name)),
                    "values": values_json(values.get(one.name, [])),
                }
                for one in records
            ]
        )
        return
    print_table(
        ("type", "queue", "priority", "attempts", "paused", "limits", "retries"),
        [
            (
                record.name,
                record.queue,
                str(record.priority),
                str(record.max_attempts),
                "no" if record.paused_at is None else f"since {record.paused_at:%Y-%m-%d %H:%M:%S}",
                _limits(rules.get(record.name), values.get(record.name, [])),
                "yes"
                if record.retries_stopped_at is None
                else f"stopped at {record.retries_stopped_at:%Y-%m-%d %H:%M:%S}: "
                f"{record.retries_stopped_because}",
            )
            for record in records
        ],
    )


def _limits(rule: RuleRecord | None, values: Records) -> str:
    words = [] if rule is None and values else [shown_rule(rule)]
    return "; ".join([*words, *shown_values(values)])


@types.command("pause")
@app_option
@click.argument("name")
def pause_type(application: str | None, name: str) -> None:
    """Grant no more tasks of a type; what runs goes on."""
    checked_name("type", name)

    async def pause(app: App) -> bool:
        async with app:
            await app.types.pause(name)
            return await _is_registered(app, name)

    _warn_unless(run(pause(load_lasting_app(application))), name)
    click.echo(legible(f"type '{name}' is paused; what runs goes on"))


@types.command("resume")
@app_option
@click.argument("name")
def resume_type(application: str | None, name: str) -> None:
    """Grant tasks of a type again."""
    checked_name("type", name)

    async def resume(app: App) -> bool:
        async with app:
            return await app.types.resume(name)

    was_paused = run(resume(load_lasting_app(application)))
    click.echo(legible(f"type '{name}' {'is resumed' if was_paused else 'was not paused'}"))


@types.command("limit")
@app_option
@click.argument("name")
@limit_options
@single_option("--weight", help="the share of a value among others, if it has no --concurrency")
@value_options
def limit_type(
    application: str | None,
    name: str,
    values: tuple[str, ...],
    each_value: bool,
    weight: str | None,
    **typed: str | None,
) -> None:
    """Limit the tasks of a type, or those of a value; instead of what code declares. None lifts a limit."""
    if is_of_values(values, each_value=each_value):
        typed["weight"] = weight
        said, warning = run(change_value(load_lasting_app(application), name, values, typed))
        if warning is not None:
            click.echo(legible(f"windlass: {warning}"), err=True)
        click.echo(legible(said))
        return
    if weight is not None:
        raise ConfigurationError(
            f"--weight {shown(weight)} is that of a value; give --value or --each-value too, or use "
            "windlass queues limit for the weight of a queue"
        )
    rule = lane_rule(RuleScope.TYPE, name, cast("QueueOptions", given_options(**typed)))

    async def limit(app: App) -> tuple[str, bool]:
        async with app:
            return await change_rule(app, rule), await _is_registered(app, name)

    said, is_known = run(limit(load_lasting_app(application)))
    _warn_unless(is_known, name)
    click.echo(legible(said))


@types.command("reset")
@app_option
@click.argument("name")
@value_options
def reset_type(
    application: str | None, name: str, values: tuple[str, ...], each_value: bool
) -> None:
    """Let what code declares of a type, or of a value, stand again."""
    checked_name("type", name)
    if is_of_values(values, each_value=each_value):
        click.echo(legible(run(reset_value(load_lasting_app(application), name, values))))
        return
    said = run(reset_rule(load_lasting_app(application), RuleScope.TYPE, name))
    click.echo(legible(said))


async def _is_registered(app: App, name: str) -> bool:
    return await (await app.store()).type_defaults(name) is not None


def _warn_unless(is_known: bool, name: str) -> None:
    if not is_known:
        click.echo(legible(f"windlass: no worker has ever registered the type '{name}'"), err=True)


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
    _warn_unless(is_known, name)
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
