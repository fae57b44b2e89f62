"""How long to wait before the next attempt. The random draw is passed in."""

import math
from dataclasses import dataclass
from typing import Literal

from windlass.model.errors import ConfigurationError

Backoff = Literal["exponential", "linear", "fixed"]
Jitter = Literal["full", "none"]


@dataclass(frozen=True, slots=True)
class Retry:
    """How often and how far apart a task is tried; `base` and `ceiling` are seconds."""

    max_attempts: int = 4
    backoff: Backoff = "exponential"
    base: float = 2.0
    ceiling: float = 3600.0
    jitter: Jitter = "full"

    def __post_init__(self) -> None:
        if type(self.max_attempts) is not int or not 1 <= self.max_attempts <= 30_000:
            raise ConfigurationError(
                f"retry: max_attempts {self.max_attempts!r} must be an integer from 1 to 30000"
            )
        if self.backoff not in ("exponential", "linear", "fixed"):
            raise ConfigurationError(
                f"retry: backoff {self.backoff!r} is not known; use exponential, linear or fixed"
            )
        if self.jitter not in ("full", "none"):
            raise ConfigurationError(
                f"retry: jitter {self.jitter!r} is not known; use full or none"
            )
        for name, value in (("base", self.base), ("ceiling", self.ceiling)):
            if not (math.isfinite(value) and value >= 0):
                raise ConfigurationError(f"retry: {name} {value!r} must be seconds, not below 0")


def delay_before(retry: Retry, attempt: int, draw: float) -> float:
    """Return the seconds between attempt `attempt` (from 1) and the next; `draw` is in [0, 1)."""
    match retry.backoff:
        case "fixed":
            seconds = retry.base
        case "linear":
            seconds = retry.base * attempt
        case "exponential":
            # The exponent is bounded so that the power of a long row of failures stays finite.
            seconds = retry.base * 2.0 ** min(attempt - 1, 64)
    seconds = min(seconds, retry.ceiling)
    return seconds * draw if retry.jitter == "full" else seconds
