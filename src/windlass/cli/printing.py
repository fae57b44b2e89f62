"""Records on standard output: for machines, or for people."""

from collections.abc import Sequence
from typing import Any

import click
import msgspec


def print_json(records: Sequence[Any]) -> None:
    """Print records as one array."""
    click.echo(msgspec.json.encode(records).decode())


def print_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows in columns as wide as they need."""
    widths = [max(len(row[column]) for row in (titles, *rows)) for column in range(len(titles))]
    for row in (titles, *rows):
        line = "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        click.echo(line.rstrip())
