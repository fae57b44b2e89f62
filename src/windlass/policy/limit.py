"""How many tasks at once, or in a time: what users write, and what a bucket of tokens lets through."""

import hashlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, NamedTuple

from windlass.model.errors import ConfigurationError
from windlass.model.limits import shown

_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*/\s*([0-9]+(?:\.[0-9]+)?)?\s*([a-z]+)")
_SECONDS = {
    **dict.fromkeys(("s", "sec", "second"), 1.0),
    **dict.fromkeys(("m", "min", "minute"), 60.0),
    **dict.fromkeys(("h", "hour"), 3600.0),
    **dict.fromkeys(("d", "day"), 86_400.0),
}
MOST = 1_000_000_000
BURST_SECONDS = 0.1  # what a rate lets through at once, unless somebody says otherwise
WORTH_A_LOOK = 0.05  # seconds of tokens: to come back for each one would cost more than it is worth
LONGEST_VALUE = 200  # characters of a value that a limit is by
KEPT_OF_LONGER = 160  # and what tells it from others that begin alike


@dataclass(frozen=True, slots=True)
class Limit:
    """How many tasks of a type may be held by workers at once, and how many may begin in a time.

    `rate` is a number for a unit of time, as "10/s", "100/m" or "5/10s". `burst` are those that may begin
    at once after a quiet time: a tenth of a second's worth, and one at least, unless it is given. `by` names
    an argument, or several: then all of it holds for each value of it, and without the others values take
    turns.
    """

    concurrency: int | None = None
    rate: str | float | None = None
    burst: float | None = None
    by: str | Sequence[str] | None = None

    def __post_init__(self) -> None:
        check_limit("Limit", self.concurrency, self.rate, self.burst)
        if self.by is not None:
            object.__setattr__(self, "by", _checked_arguments(self.by))  # it is frozen
        elif self.concurrency is None and self.rate is None:
            raise ConfigurationError("Limit() limits nothing: give concurrency=, rate= or both")

    @property
    def arguments(self) -> tuple[str, ...]:
        """The names of those that it is by."""
        return () if self.by is None else tuple(self.by)


def _checked_arguments(given: Any) -> tuple[str, ...]:
    names = (given,) if isinstance(given, str) else given
    if not isinstance(names, list | tuple) or not all(isinstance(one, str) for one in names):
        raise ConfigurationError(
            f"Limit: by {shown(given)}: give the name of an argument, or a tuple of names"
        )
    if not names or "" in names:
        raise ConfigurationError(f"Limit: by {shown(given)} names no argument; leave it out")
    if len(set(names)) < len(names):
        raise ConfigurationError(f"Limit: by {shown(given)} names an argument twice; leave one out")
    return tuple(names)


def value_text(values: Sequence[Any]) -> str:
    """Name the values, as JSON has them, of the arguments that a limit is by: what a rule is found by."""
    if len(values) == 1:
        text = _as_text(values[0])
    else:
        texts = [None if one is None else _as_text(one) for one in values]
        text = json.dumps(texts, ensure_ascii=False)
    if len(text) <= LONGEST_VALUE:
        return text
    digest = hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()
    return f"{text[:KEPT_OF_LONGER]}…{digest}"


def _as_text(value: Any) -> str:
    if isinstance(value, float):
        return format(Decimal(repr(value + 0.0)), "f")  # all its digits, and no zero below zero
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def check_limit(what: str, concurrency: Any, rate: Any, burst: Any) -> None:
    """Raise unless a limit can be made of these."""
    if concurrency is not None and (
        type(concurrency) is not int or not 1 <= concurrency <= 1_000_000
    ):
        raise ConfigurationError(
            f"{what}: concurrency {shown(concurrency)}: use an integer from 1 to 1000000"
        )
    if rate is not None:
        per_second(f"{what}: rate", rate)
    if burst is None:
        return
    if rate is None:
        raise ConfigurationError(f"{what}: burst {shown(burst)} is part of a rate; give rate= too")
    if type(burst) not in (int, float) or not 1 <= burst <= MOST:
        raise ConfigurationError(f"{what}: burst {shown(burst)}: use a number from 1 to {MOST}")


def per_second(what: str, rate: Any) -> float:
    """Read a rate, a text as "100/m" or a number for each second."""
    way_out = 'write it as "10/s", "100/m", "5/10s" or "1000/h"'
    if type(rate) in (int, float):
        found = float(min(rate, 2 * MOST))  # an integer may be larger than any float
    else:
        match = _RATE.fullmatch(rate.strip()) if isinstance(rate, str) else None
        if match is None or match[3] not in _SECONDS:
            raise ConfigurationError(f"{what} {shown(rate)} is not a rate; {way_out}")
        span = float(match[2] or 1) * _SECONDS[match[3]]
        found = float(match[1]) / span if span else math.inf
    if not 1 / (366 * 86_400) <= found <= MOST:
        raise ConfigurationError(
            f"{what} {shown(rate)}: use a rate from one in a year to {MOST} in a second; {way_out}"
        )
    return found


def usual_burst(rate: float) -> float:
    """How many may begin at once, unless somebody says otherwise."""
    return max(1.0, rate * BURST_SECONDS)


class Bucket(NamedTuple):
    """The tokens of a rate as they were counted; one is taken for each task that is let through."""

    tokens: float
    counted_at: float  # seconds, by the store's clock

    def at(self, now: float, rate: float, burst: float) -> "Bucket":
        """Fill it up to a moment; after the clock was set back nobody knows for how long."""
        if self.counted_at > now:
            return Bucket(burst, now)
        return Bucket(min(burst, self.tokens + (now - self.counted_at) * rate), now)

    @property
    def whole(self) -> int:
        """How many tasks it lets through."""
        return max(0, math.floor(self.tokens + 1e-6))

    def more_in(self, rate: float, burst: float) -> float | None:
        """Say in how many seconds it is worth to ask again, if it is empty."""
        if self.tokens >= 1:
            return None
        return (max(1.0, min(burst, rate * WORTH_A_LOOK)) - self.tokens) / rate
