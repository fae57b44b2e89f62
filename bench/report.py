"""The tables that people read, and the lines that programs read."""

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import NamedTuple

from bench.cases.case import Case
from bench.ratios import Measured, by_round, ratio

OTHERS = "others_percent"


class Quantity(NamedTuple):
    """How a value is called and written."""

    title: str
    form: str
    more: bool = False  # is better


QUANTITIES = {
    "rate": Quantity("tasks/s", ",.0f", more=True),
    "enqueue_rate": Quantity("enqueued/s", ",.0f", more=True),
    "worker_us": Quantity("worker µs", ".1f"),
    "postgres_us": Quantity("PostgreSQL µs", ".1f"),
    "statements": Quantity("statements", ".4f"),
    "wal": Quantity("WAL B", ",.0f"),
    "wal_all": Quantity("WAL with enqueue", ",.0f"),
    "buffers": Quantity("buffers", ".1f"),
    "rss_mb": Quantity("RSS MB", ".0f"),
    "p50_ms": Quantity("p50 ms", ".2f"),
    "p99_ms": Quantity("p99 ms", ".2f"),
    "cpu_percent": Quantity("CPU %", ".2f"),
    "postgres_percent": Quantity("PostgreSQL CPU %", ".2f"),
    "statements_s": Quantity("statements/s", ".2f"),
    "calls": Quantity("calls/s", ",.0f"),
    "share_percent": Quantity("share of the second %", ".0f", more=True),
    "wait_ms": Quantity("its first task after ms", ",.0f"),
    **{f"part_{part}": Quantity(f"fifth {part}", ",.0f", more=True) for part in range(1, 6)},
}


def table(case: Case, measured: Sequence[Measured]) -> str:
    """One case: the median of every value, then the ratios."""
    ours = [one for one in measured if one.case == case.name]
    titles = ["", *(QUANTITIES[name].title for name in case.shown)]
    rows = [[run.label, *_medians(ours, run.label, case.shown)] for run in case.runs]
    parts = [f"## {case.name}: {case.about}", _markdown(titles, rows)]
    ratios = [_ratio_row(ours, *pair, name) for pair in case.pairs for name in case.compared]
    found = [row for row in ratios if row is not None]
    if found:
        parts.append(_markdown(["ratio", "of", "median", "quartile", "rounds"], found))
    others = [one.values[OTHERS] for one in ours if OTHERS in one.values]
    if others:
        parts.append(f"Others had {statistics.median(others):.0f} % of the machine meanwhile.")
    return "\n\n".join(parts) + "\n"


def line(measured: Measured) -> str:
    """One line of JSON."""
    values = {key: value for key, value in measured.values.items() if math.isfinite(value)}
    return json.dumps(asdict(measured) | {"values": values})


def parse(lines: Iterable[str]) -> list[Measured]:
    """Read the lines back; those that say something else are passed over."""
    said = [json.loads(text) for text in lines]
    return [Measured(**one) for one in said if one.keys() == Measured.__dataclass_fields__.keys()]


def _medians(measured: Sequence[Measured], label: str, names: Sequence[str]) -> list[str]:
    cells = []
    for name in names:
        values = [
            value for value in by_round(measured, label, name).values() if math.isfinite(value)
        ]
        cells.append(f"{statistics.median(values):{QUANTITIES[name].form}}" if values else "-")
    return cells


def _ratio_row(measured: Sequence[Measured], over: str, under: str, name: str) -> list[str] | None:
    quantity = QUANTITIES[name]
    found = ratio(
        by_round(measured, over, name), by_round(measured, under, name), more=quantity.more
    )
    if found is None:
        return None
    said = (f"{over} ÷ {under}", quantity.title, f"{found.median:.2f}", f"{found.quartile:.2f}")
    return [*said, str(found.rounds)]


def _markdown(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    lines = [titles, ["-" * width for width in widths], *rows]
    return "\n".join(_row(cells, widths) for cells in lines)


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = zip(cells, widths, strict=True)
    padded = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]
    return f"| {' | '.join(padded)} |"
