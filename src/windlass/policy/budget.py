"""How many attempts may be retries: a share of the first attempts of late. The time is passed in."""

from collections import deque
from dataclasses import dataclass

from windlass.model.errors import ConfigurationError
from windlass.model.limits import shown

PARTS = 10  # of a window: counts are forgotten a part at a time


@dataclass(frozen=True, slots=True)
class Budget:
    """At most `share` retries for each first attempt within `window` seconds, and `at_least` so many.

    Counted by each worker for itself, for each type.
    """

    share: float = 0.2
    window: float = 60.0
    at_least: int = 10

    def __post_init__(self) -> None:
        if type(self.share) not in (int, float) or not 0 <= self.share <= 100:
            raise ConfigurationError(
                f"retry: budget share {shown(self.share)} must be a number from 0 to 100"
            )
        if type(self.window) not in (int, float) or not 1 <= self.window <= 86_400:
            raise ConfigurationError(
                f"retry: budget window {shown(self.window)} must be seconds, from 1 to a day"
            )
        if type(self.at_least) is not int or not 1 <= self.at_least <= 1_000_000:
            raise ConfigurationError(
                f"retry: budget at_least {shown(self.at_least)} must be an integer from 1 to "
                "1000000: without any, the last retries would wait for ever"
            )


@dataclass(slots=True)
class _Part:
    """What began in one part of the window."""

    number: int  # of the part, since the clock began
    first: int = 0
    retries: int = 0


class Account:
    """What was begun of late under a budget."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._parts: deque[_Part] = deque()

    def begin(self, *, is_retry: bool, now: float) -> bool:
        """Count an attempt that is about to begin; false: it is a retry for which there is nothing left."""
        part = self._now(now)
        if not is_retry:
            part.first += 1
            return True
        first = sum(one.first for one in self._parts)
        retries = sum(one.retries for one in self._parts)
        if retries >= max(first * self._budget.share, self._budget.at_least):
            return False
        part.retries += 1
        return True

    def wait(self, draw: float) -> float:
        """Seconds after which to ask again: about a part of the window, spread by `draw` in [0, 1)."""
        return self._budget.window / PARTS * (0.5 + draw)

    def _now(self, now: float) -> _Part:
        number = int(now * PARTS / self._budget.window)
        while self._parts and self._parts[0].number <= number - PARTS:
            self._parts.popleft()
        if not self._parts or self._parts[-1].number != number:
            self._parts.append(_Part(number))
        return self._parts[-1]
