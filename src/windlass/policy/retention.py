"""When ended tasks may go, and in which partitions they rest until then."""

from collections.abc import Iterable
from datetime import date, timedelta
from typing import NamedTuple

DAYS_AHEAD = 3  # how long settlements find their partition without anybody making one
DAILY_UNTIL = 30  # days from today; beyond that a partition spans a week


class Span(NamedTuple):
    """The days from `first` until before `past`."""

    first: date
    past: date


def missing_spans(
    today: date, retentions: Iterable[timedelta], present: Iterable[Span]
) -> list[Span]:
    """Return the partitions to make so that tasks ending in the coming days find a place."""
    covered = sorted(present)
    wanted: list[Span] = []
    for retention in retentions:
        for ahead in range(-1, DAYS_AHEAD + 1):
            # One day either side: the retention may carry an end over midnight.
            day = today + timedelta(days=retention.days + ahead + 1)
            if any(span.first <= day < span.past for span in covered):
                continue
            span = _gap(_span_of(day, today), day, covered)
            wanted.append(span)
            covered.append(span)
    return sorted(wanted)


def is_over(span: Span, today: date) -> bool:
    """Whether every task of this partition may go."""
    return span.past <= today


def _span_of(day: date, today: date) -> Span:
    if (day - today).days <= DAILY_UNTIL:
        return Span(day, day + timedelta(days=1))
    monday = day - timedelta(days=day.weekday())
    return Span(monday, monday + timedelta(days=7))


def _gap(span: Span, day: date, covered: Iterable[Span]) -> Span:
    """Cut a span down to the part around `day` that no other covers."""
    first, past = span
    for other in covered:
        if other.past <= day:
            first = max(first, other.past)
        if other.first > day:
            past = min(past, other.first)
    return Span(first, past)
