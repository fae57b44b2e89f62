"""Records on standard output: for machines, or for people."""

import re
from collections.abc import Sequence
from typing import Any

import click
import msgspec

# Control characters but the end of a line, and those that turn the direction of a text around.
_OBEYED = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def legible(text: str) -> str:
    """Spell out what a terminal would obey instead of showing it."""
    return _OBEYED.sub(lambda found: repr(found[0])[1:-1], text)


def print_json(records: Any) -> None:
    """Print records as one array, or one object."""
    click.echo(msgspec.json.encode(records).decode())


def print_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows in columns as wide as they need."""
    lines = [[legible(cell) for cell in row] for row in (titles, *rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(titles))]
    for row in lines:
        line = "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        click.echo(line.rstrip())
