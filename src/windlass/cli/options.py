"""How what is typed is read: single values, times, priorities, commands of a group."""

import re
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

import click
from click.types import StringParamType

from windlass.client import checked_time
from windlass.model.errors import ConfigurationError
from windlass.model.limits import shown


class _Whole(StringParamType):
    """A text; one that comes from the environment is not split at its spaces."""

    envvar_list_splitter = "\0"  # no variable can hold one


def single_option(*names: str, **attributes: Any) -> Callable[[Any], Any]:
    """`click.option` for one value: given twice, it is an error that names both."""
    attributes.setdefault("type", _Whole())
    if "default" in attributes:
        attributes["default"] = [attributes["default"]]
    # Left to itself click keeps the last value, so all of them are asked for.
    return click.option(*names, multiple=True, callback=_only, **attributes)


def _only(_: click.Context, option: click.Parameter, given: Sequence[Any]) -> Any:
    if len(given) > 1:
        values = " and ".join(shown(value) for value in given[:2])
        raise ConfigurationError(
            f"{option.opts[-1]} takes one value and was given {values}; "
            "leave one out, or run the command once for each"
        )
    return given[0] if given else None


def parse_time(option: str, text: str) -> datetime:
    """Read a time with an offset."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigurationError(f"{option} {text!r} is not a time in ISO 8601") from None
    if moment.tzinfo is None:
        raise ConfigurationError(f"{option} {text!r} has no offset; add one, as in +00:00 or Z")
    return checked_time(option, moment)


def parse_expiry(option: str, text: str) -> datetime | float:
    """Read seconds, or a time."""
    try:
        return float(text)
    except ValueError:
        return parse_time(option, text)


def parse_priority(text: str) -> int | str:
    """Read a priority by number or by name."""
    return int(text) if re.fullmatch("[0-9]{1,9}", text) else text


def parse_limits(option: str, given: Sequence[str]) -> dict[str, int] | None:
    """Read `NAME=N`, any number of times."""
    limits: dict[str, int] = {}
    for text in given:
        name, _, number = text.rpartition("=")
        if not name or not re.fullmatch("[0-9]{1,9}", number):
            raise ConfigurationError(f"{option} {shown(text)} is not NAME=N, as in mail=5")
        if limits.setdefault(name, int(number)) != int(number):
            raise ConfigurationError(
                f"{option} is given {limits[name]} and {int(number)} for queue '{name}'; leave one out"
            )
    return limits or None


class Subcommands(click.Group):
    """A group that says of a promised command that it is not built yet."""

    not_built: frozenset[str] = frozenset()

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Find a command."""
        if cmd_name in self.not_built:
            raise ConfigurationError(f"windlass {self.name} {cmd_name} is not built yet")
        return super().get_command(ctx, cmd_name)
