"""A picture of the results: throughput and latency side by side, as SVG."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from bench.contenders import OURS
from bench.ratios import Measured, by_round

WIDTH, ROW, TOP, NAMES, VALUES = 500, 22, 58, 180, 78  # pixels; of one panel
INK, OURS_COLOUR, OURS_LIGHT, COLOUR, LIGHT = "#222", "#1f6feb", "#8fb8f5", "#8c959f", "#c9ced4"


@dataclass(frozen=True)
class Panel:
    """Bars of two values for each contender."""

    title: str
    cases: tuple[tuple[str, str, str], ...]  # case, value, what it is called
    form: str
    largest_first: bool


PANELS = (
    Panel(
        "Drained tasks per second",
        (("drain-1", "rate", "one process"), ("drain-2", "rate", "two")),
        ",.0f",
        largest_first=True,
    ),
    Panel(
        "Milliseconds from enqueue to start",
        (("latency", "p50_ms", "median"), ("latency", "p99_ms", "p99")),
        ".1f",
        largest_first=False,
    ),
)


def picture(measured: Sequence[Measured]) -> str:
    """Draw what was measured; a panel without measurements is left out."""
    drawn = [(panel, _bars(panel, measured)) for panel in PANELS]
    drawn = [(panel, bars) for panel, bars in drawn if bars]
    height = TOP + max((len(bars) for _, bars in drawn), default=0) * (2 * ROW + 8) + 12
    size = f'width="{WIDTH * max(1, len(drawn))}" height="{height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for place, (panel, bars) in enumerate(drawn):
        parts += [f'<g transform="translate({WIDTH * place} 0)">', *_panel(panel, bars), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def _bars(panel: Panel, measured: Sequence[Measured]) -> dict[str, list[float]]:
    """The medians of each contender that has all of them, the best first."""
    bars: dict[str, list[float]] = {}
    for label in dict.fromkeys(one.label for one in measured):
        medians = []
        for case, name, _ in panel.cases:
            ours = [one for one in measured if one.case == case]
            values = list(by_round(ours, label, name).values())
            if values:
                medians.append(statistics.median(values))
        if len(medians) == len(panel.cases):
            bars[label] = medians
    ordered = sorted(bars.items(), key=lambda one: one[1][0], reverse=panel.largest_first)
    return dict(ordered)


def _panel(panel: Panel, bars: dict[str, list[float]]) -> list[str]:
    scale = (WIDTH - NAMES - VALUES) / max(value for values in bars.values() for value in values)
    called = " and ".join(name for _, _, name in panel.cases)
    parts = [
        _text(12, 24, panel.title, 'font-size="15" font-weight="bold"'),
        _text(12, 43, called),
    ]
    for number, (label, values) in enumerate(bars.items()):
        is_ours = label.startswith(OURS)
        top = TOP + number * (2 * ROW + 8)
        weight = "bold" if is_ours else "normal"
        style = f'text-anchor="end" font-weight="{weight}"'
        parts.append(_text(NAMES - 6, top + ROW + 4, label, style))
        colours = (OURS_COLOUR, OURS_LIGHT) if is_ours else (COLOUR, LIGHT)
        for place, value in enumerate(values):
            y, length = top + place * ROW, max(1.0, scale * value)
            parts += [
                _rectangle(y, length, colours[place]),
                _text(NAMES + length + 5, y + 14, f"{value:{panel.form}}"),
            ]
    return parts


def _text(x: float, y: float, said: str, style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y}" fill="{INK}" {style}>{escape(said)}</text>'


def _rectangle(y: float, length: float, colour: str) -> str:
    size = f'width="{length:.1f}" height="{ROW - 3}"'
    return f'<rect x="{NAMES}" y="{y}" {size} fill="{colour}"/>'
