"""How limits by value are typed, and shown."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, cast

import click

from windlass.app import App
from windlass.cli.limits import given_options, rate_words
from windlass.client import ValueOptions, checked_value, value_rule
from windlass.model.errors import ConfigurationError
from windlass.model.limits import shown
from windlass.model.rule import ValueRecord, ValueRule
from windlass.registry import checked_name

SHOWN = 3  # values of a type in a table

Records = list[ValueRecord]


def value_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Take which value is meant, or that each is."""
    for option in (
        click.option(
            "--each-value", is_flag=True, help="for each value that has no rule of its own"
        ),
        click.option(
            "--value",
            "values",
            multiple=True,
            help="for this value of the argument its limit is by; of several in their order",
        ),
    ):
        command = option(command)
    return command


def is_of_values(values: Sequence[str], *, each_value: bool) -> bool:
    """Whether a command is about values of a type, and not about all its tasks."""
    if values and each_value:
        raise ConfigurationError(
            f"--value {shown(values[0])} and --each-value exclude each other; give one"
        )
    return each_value or bool(values)


async def change_value(
    app: App, name: str, values: tuple[str, ...], typed: dict[str, str | None]
) -> tuple[str, str | None]:
    """Set a rule; return what is to be said of it, and a warning if there is one."""
    options = cast("ValueOptions", given_options(**typed))
    value = _checked(name, values)
    rule = value_rule(name, value, options)
    async with app:
        if values:
            await app.values.change(name, values, **options)
        else:
            await app.values.change_each(name, **options)
        known = await (await app.store()).type_defaults(name)
        said = _said(rule.type, value, await app.values.rules(name))
    if known is None or known.limit_by is not None:
        return said, None if known else f"no worker has ever registered the type '{name}'"
    return said, f"type '{name}' has no limit by a value: this holds once it has one, Limit(by=…)"


async def reset_value(app: App, name: str, values: tuple[str, ...]) -> str:
    """Remove what was set by hand; return what is to be said of it."""
    value = _checked(name, values)
    async with app:
        if values:
            was_set = await app.values.reset(name, values)
        else:
            was_set = await app.values.reset_each(name)
        said = _said(name, value, await app.values.rules(name))
    return said if was_set else f"nothing was set by hand; {said}"


def _checked(name: str, values: tuple[str, ...]) -> str | None:
    return checked_value(checked_name("type", name), values) if values else None


def _said(name: str, value: str | None, records: Records) -> str:
    found = {record.rule.value: record for record in records}
    whose = "each value" if value is None else f"value {shown(value)}"
    if value in found:
        return f"type '{name}', {whose}: {_in_words(found[value])}"
    if value is None or None not in found:
        return f"type '{name}', {whose}: no limits"
    return f"type '{name}', {whose}: as each value, {_in_words(found[None])}"


async def value_rules_of(app: App) -> dict[str, Records]:
    """The rules in force by type."""
    found = defaultdict(list)
    for record in await app.values.rules():
        found[record.rule.type].append(record)
    return found


def shown_values(records: Records) -> list[str]:
    """The rules of a type in a few words, for a table."""
    words = [
        f"{'each value' if one.rule.value is None else shown(one.rule.value)}: {_in_words(one)}"
        for one in records[: SHOWN + 1]
    ]
    return [*words, f"{len(records) - len(words)} more"] if len(words) < len(records) else words


def _in_words(record: ValueRecord) -> str:
    words = _words(record.rule) or ["takes turns"]
    return ", ".join(words) + (" (set by hand)" if record.by_operator else "")


def _words(rule: ValueRule) -> list[str]:
    words = [] if rule.concurrency is None else [f"{rule.concurrency} at once"]
    words += rate_words(rule)
    return words if rule.weight is None else [*words, f"weight {rule.weight}"]


def values_json(records: Records) -> list[dict[str, Any]]:
    """The rules of a type for programs; that for each value has none."""
    said = [asdict(one.rule) | {"by_operator": one.by_operator} for one in records]
    return [{name: one[name] for name in one if name != "type"} for one in said]
