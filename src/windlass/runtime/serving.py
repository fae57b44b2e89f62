"""Which queues a worker serves: by what weight, and how many tasks of each at once."""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from windlass.model.errors import ConfigurationError
from windlass.model.limits import HEAVIEST, shown
from windlass.model.task import ClaimedTask
from windlass.policy.shares import OTHERS, Queues
from windlass.registry import checked_name, checked_names

MOST_AT_ONCE = 1_000_000  # tasks
UNLIMITED = 1 << 30


@dataclass(frozen=True, slots=True)
class Serving:
    """What a worker is asked to serve."""

    named: Mapping[str, int | None] | None = (
        None  # with what each weighs, if that is said; None: all queues
    )
    most: Mapping[str, int] = field(default_factory=dict)  # tasks at once, of queues with a limit

    @property
    def queues(self) -> Queues | None:
        """Their names; None: all."""
        return None if self.named is None else tuple(self.named)

    def weights(self, declared: Mapping[str, int]) -> dict[Queues, int]:
        """What is claimed from together and its share, given what queues weigh where nothing is said here.

        Without any, all queues are claimed from at once, merged by rank.
        """
        if self.named is None:
            return self._weights_of_all(declared)
        weights = {name: weight or declared.get(name) for name, weight in self.named.items()}
        if any(weights.values()):
            return {(name,): weight or 1 for name, weight in weights.items()}
        if not self.most:
            return {}
        others = tuple(name for name in weights if name not in self.most)
        together = {others: len(others)} if others else {}
        return together | {(name,): 1 for name in weights if name in self.most}

    def _weights_of_all(self, declared: Mapping[str, int]) -> dict[Queues, int]:
        """Those that are named by themselves, and the others together."""
        weights: dict[Queues, int] = {}
        for name in sorted({*self.most, *declared}):
            weights[(name,)] = declared.get(name, 1)
        if weights:
            weights[(OTHERS,)] = 1
        return weights


def checked_serving(queues: Any, most: Any) -> Serving:
    """Return what `queues` and `queue_concurrency` ask for, or raise."""
    named = None if queues is None else _checked_queues(queues)
    return Serving(named, _checked_limits(most, named))


def _checked_queues(given: Any) -> dict[str, int | None]:
    """The names, and what each weighs, if that is said."""
    if not checked_names("queues", "queue", given):
        raise ConfigurationError("queues is empty; name one at least, or leave it out for all")
    weights: dict[str, int | None] = {}
    for queue in given:
        name, weight = _name_and_weight(queue)
        if weights.get(name, weight) != weight:
            raise ConfigurationError(
                f"queue '{name}' is named with two weights, {weights[name] or 'none'} and "
                f"{weight or 'none'}; name it once"
            )
        weights[name] = weight
    return weights


def _name_and_weight(queue: str) -> tuple[str, int | None]:
    """Read `NAME` or `NAME:WEIGHT`; of a name that holds a colon the last one is the weight's."""
    name, colon, weight = queue.rpartition(":")
    if not colon:
        return queue, None
    if not re.fullmatch("[0-9]{1,9}", weight) or not 1 <= int(weight) <= HEAVIEST:
        raise ConfigurationError(
            f"queue {shown(queue)}: the weight {shown(weight)} is no whole number from 1 to "
            f"{HEAVIEST}; give one, as in 'mail:3', or the name alone. If the colon is part of the "
            "name, add a weight after it, as in 'a:b:1'"
        )
    return checked_name("queue", name), int(weight)


def _checked_limits(given: Any, queues: Collection[str] | None) -> dict[str, int]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ConfigurationError(
            f"queue_concurrency {shown(given)}: give a dict, as in {{'mail': 5}}"
        )
    for name, most in given.items():
        checked_name("queue", name)
        if isinstance(most, bool) or not isinstance(most, int) or not 1 <= most <= MOST_AT_ONCE:
            raise ConfigurationError(
                f"queue_concurrency of queue '{name}' is {shown(most)}; use a whole number from 1 "
                f"to {MOST_AT_ONCE}, or pause the queue"
            )
        if queues is not None and name not in queues:
            raise ConfigurationError(
                f"queue_concurrency names queue '{name}', which is not among those that this worker "
                "is told to serve; name all of them, as in queues=['mail', 'default'] or --queue"
            )
    return dict(given)


class QueueRoom:
    """How many tasks of each limited queue a worker may still take, whatever kind of handlers they have."""

    def __init__(self, most: Mapping[str, int]) -> None:
        self._most = most
        self._held: Counter[str] = Counter()
        self.freed: Callable[[], None] = lambda: None  # told when one that was full is not any more

    def of(self, queues: Queues) -> int:
        """How many of these would be taken now, if each came alone."""
        return min(
            (self._most[one] - self._held[one] for one in queues if one in self._most),
            default=UNLIMITED,
        )

    @property
    def full(self) -> tuple[str, ...]:
        """Of which nothing would be taken now. From any thread."""
        return tuple(one for one, most in self._most.items() if self._held[one] >= most)

    def take(self, tasks: Iterable[ClaimedTask]) -> None:
        """Count tasks that were claimed."""
        if self._most:
            self._held.update(task.queue for task in tasks if task.queue in self._most)

    def leave(self, queue: str) -> None:
        """Count one that has ended, or was given back."""
        if queue in self._most:
            was_full = self._held[queue] >= self._most[queue]
            self._held[queue] -= 1
            if was_full:
                self.freed()
