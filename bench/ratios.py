"""What several rounds say: the median of the ratios within each, and the worse quartile of them."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Values = dict[str, float]


@dataclass(frozen=True)
class Measured:
    """What one run of one round gave."""

    case: str
    label: str
    round: int
    values: Values


@dataclass(frozen=True)
class Ratio:
    """One thing divided by another, round by round."""

    median: float
    quartile: float  # the lower one, or the upper one of what is to be small
    rounds: int


def ratio(over: Mapping[int, float], under: Mapping[int, float], *, more: bool) -> Ratio | None:
    """Divide round by round; `more` is better. None if no round has both."""
    ratios = [over[number] / under[number] for number in over if under.get(number)]
    if not ratios:
        return None
    return Ratio(statistics.median(ratios), quartile(ratios, lower=more), len(ratios))


def quartile(values: Sequence[float], *, lower: bool) -> float:
    """The value that a quarter of the values is below, or above."""
    if len(values) == 1:
        return values[0]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return first if lower else third


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that so many percent do not exceed."""
    place = max(0, -(-len(values) * percent // 100) - 1)
    return sorted(values)[int(place)]


def by_round(measured: Iterable[Measured], label: str, name: str) -> dict[int, float]:
    """Return one value of one label, by the number of its round."""
    return {
        one.round: one.values[name] for one in measured if one.label == label and name in one.values
    }
