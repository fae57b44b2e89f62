"""How long to wait before the next attempt. The random draw is passed in."""

from dataclasses import dataclass
from typing import Literal

from windlass.model.errors import ConfigurationError
from windlass.model.limits import LONGEST_SECONDS, shown

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
                f"retry: max_attempts {shown(self.max_attempts)} must be an integer from 1 to 30000"
            )
        if self.backoff not in ("exponential", "linear", "fixed"):
            raise ConfigurationError(
                f"retry: backoff {shown(self.backoff)} is not known; use exponential, linear or fixed"
            )
        if self.jitter not in ("full", "none"):
            raise ConfigurationError(
                f"retry: jitter {shown(self.jitter)} is not known; use full or none"
            )
        for name, value in (("base", self.base), ("ceiling", self.ceiling)):
            if type(value) not in (int, float) or not 0 <= value <= LONGEST_SECONDS:
                raise ConfigurationError(
                    f"retry: {name} {shown(value)} must be a number of seconds, "
                    "from 0 to a hundred years"
                )


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
