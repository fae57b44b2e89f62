"""How long to wait before the next attempt. The random draw is passed in."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

from windlass.model.errors import ConfigurationError
from windlass.model.limits import LONGEST_SECONDS, shown
from windlass.policy.budget import Budget

Backoff = Literal["exponential", "linear", "fixed"]
Jitter = Literal["full", "equal", "none"]

SPREAD_AFTER = 0.1  # part of the pause that the other side asked for, by which retries are spread
LONGEST_SPREAD = 1.0  # seconds


@dataclass(frozen=True, slots=True)
class Retry:
    """How often and how far apart a task is tried; `base` and `ceiling` are seconds.

    `when`, if it is given, says of an exception whether to try again, whatever its class. With
    `max_age`, in seconds or as a timedelta, no retry is due later than that after the enqueue. With
    `budget`, retries are at most a share of the first attempts of late; the others wait.
    """

    max_attempts: int = 4
    backoff: Backoff = "exponential"
    base: float = 2.0
    ceiling: float = 3600.0
    jitter: Jitter = "full"
    multiplier: float = 2.0  # of each pause, if they grow exponentially
    when: Callable[[BaseException], bool] | None = None
    max_age: float | timedelta | None = None
    budget: Budget | float | None = None

    def __post_init__(self) -> None:
        if type(self.max_attempts) is not int or not 1 <= self.max_attempts <= 30_000:
            raise ConfigurationError(
                f"retry: max_attempts {shown(self.max_attempts)} must be an integer from 1 to 30000"
            )
        if self.backoff not in ("exponential", "linear", "fixed"):
            raise ConfigurationError(
                f"retry: backoff {shown(self.backoff)} is not known; use exponential, linear or fixed"
            )
        if self.jitter not in ("full", "equal", "none"):
            raise ConfigurationError(
                f"retry: jitter {shown(self.jitter)} is not known; use full, equal or none"
            )
        if type(self.multiplier) not in (int, float) or not 1 <= self.multiplier <= 1000:
            raise ConfigurationError(
                f"retry: multiplier {shown(self.multiplier)} must be a number from 1 to 1000"
            )
        if self.max_age is not None:
            object.__setattr__(self, "max_age", _checked_age(self.max_age))  # it is frozen
        if self.budget is not None:
            object.__setattr__(self, "budget", _checked_budget(self.budget))
        if self.when is not None:
            _check_predicate(self.when)
        for name, value in (("base", self.base), ("ceiling", self.ceiling)):
            if type(value) not in (int, float) or not 0 <= value <= LONGEST_SECONDS:
                raise ConfigurationError(
                    f"retry: {name} {shown(value)} must be a number of seconds, "
                    "from 0 to a hundred years"
                )


def age_limit(retry: Retry) -> float | None:
    """Seconds after the enqueue beyond which no attempt begins."""
    age = retry.max_age
    return age.total_seconds() if isinstance(age, timedelta) else age


def _checked_age(value: Any) -> float:
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if type(seconds) not in (int, float) or not 0 < seconds <= LONGEST_SECONDS:
        raise ConfigurationError(
            f"retry: max_age {shown(value)} must be seconds or a timedelta, above 0 and at most a "
            "hundred years"
        )
    return float(seconds)


def _checked_budget(value: Any) -> Budget:
    if isinstance(value, Budget):
        return value
    if type(value) not in (int, float):
        raise ConfigurationError(
            f"retry: budget {shown(value)}: give Budget(...), or a share as 0.2"
        )
    return Budget(share=value)


def delay_before(retry: Retry, attempt: int, draw: float) -> float:
    """Return the seconds between attempt `attempt` (from 1) and the next; `draw` is in [0, 1)."""
    match retry.backoff:
        case "fixed":
            seconds = retry.base
        case "linear":
            seconds = retry.base * attempt
        case "exponential":
            seconds = retry.base * _power(retry.multiplier, attempt - 1)
    seconds = min(seconds, retry.ceiling)
    match retry.jitter:
        case "full":
            return seconds * draw
        case "equal":
            return seconds / 2 + seconds / 2 * draw
        case "none":
            return seconds


def _power(multiplier: float, exponent: int) -> float:
    """The power, bounded so that that of a long row of failures stays finite."""
    return float(multiplier) ** min(exponent, 64)


def delay_as_asked(seconds: float, draw: float) -> float:
    """Return the pause that the other side asked for, or a little more: not all come at one moment."""
    return seconds + min(seconds * SPREAD_AFTER, LONGEST_SPREAD) * draw


def _check_predicate(when: Any) -> None:
    if not callable(when):
        raise ConfigurationError(
            f"retry: when {shown(when)}: give a function of an exception that returns "
            "whether to try again"
        )
    if inspect.iscoroutinefunction(when):
        raise ConfigurationError(
            f"retry: when {shown(when)} is a coroutine function, which nobody awaits; give a plain one"
        )
