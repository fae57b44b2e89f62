"""Options that take one value, and refuse a second instead of forgetting the first."""

from collections.abc import Callable, Sequence
from typing import Any

import click
from click.types import StringParamType

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
