"""From which queues a worker claims next, and how many: deficit round robin over their weights."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from math import ceil
from typing import NamedTuple

LEAST = 20  # tasks that are worth a claim of their own, whatever the share
LOOK_AFTER = (
    0.02  # seconds until a queue that was empty is asked again, although others fill the room
)

Queues = tuple[str, ...]  # that are claimed from together, merged by rank
OTHERS = "\0"  # stands for all queues that are not named; no queue can have this name


class Ask(NamedTuple):
    """A claim to make: of which queues, and how many."""

    queues: Queues
    limit: int


class Shares:
    """What each of several queues may take of the tasks that a worker starts, by weight.

    Over time, while all of them have work. What is taken ahead of others is made up for by the next turns: a
    queue's credit says how far it is behind. One that runs empty, or may take no more, has none: its share goes
    to the others and is never asked back.
    """

    def __init__(self, weights: Mapping[Queues, float]) -> None:
        self.weights = dict(weights)
        self.credit = dict.fromkeys(weights, 0.0)
        self.empty_since: dict[Queues, float] = {}  # when those that came back short were asked

    @property
    def queues(self) -> Queues:
        """All of them."""
        return tuple(queue for queues in self.weights for queue in queues)

    def counted(self, queues: Iterable[str]) -> Counter[str]:
        """How many tasks of each queue there are, given the queue of each."""
        found = Counter(queues)
        others = [queue for queue in found if (queue,) not in self.weights]
        if (OTHERS,) in self.weights:
            found[OTHERS] = sum(found.pop(queue) for queue in others)
        return found

    def turn(self, size: int, *, room: Callable[[Queues], int], now: float) -> "Turn":
        """Begin to fill so many slots; `room` says how many of its tasks a queue may still take."""
        return Turn(self, size, room, now)


class Turn:
    """The claims that fill some slots: each is told before the next is asked for."""

    def __init__(
        self, shares: Shares, size: int, room: Callable[[Queues], int], now: float
    ) -> None:
        self._shares = shares
        self._weights = shares.weights
        self._size = self._left = size
        self._room = room
        self._now = now
        self._taken: Counter[Queues] = Counter()
        self._asked: tuple[Queues, ...] = ()
        self._limit = 0
        self._due: dict[Queues, float] = {}  # in this round, of those that are still to be asked
        self._is_first_round = True
        since = shares.empty_since
        is_time = any(now - asked_at >= LOOK_AFTER for asked_at in since.values())
        self._quiet = [
            one for one in self._weights if one in since
        ]  # seemed empty when they were last asked
        self._first_quiet = is_time

    def next(self) -> Ask | None:
        """Return the next claim; None if the slots are filled, or no queue has more."""
        if self._left < 1:
            return None
        if self._first_quiet:
            self._first_quiet = False
            if asked := self._ask_quiet(ahead=True):
                return asked
        if not self._due:
            self._begin_round()
        if self._due:
            queues = max(self._due, key=lambda one: self._due[one])
            due = max(LEAST, round(self._due.pop(queues)))
            return self._ask((queues,), min(self._left, self._room(queues), due))
        return self._ask_quiet(ahead=False)

    def _begin_round(self) -> None:
        """Divide what is left among those that seem to have work."""
        active = [
            one
            for one in self._weights
            if one not in self._shares.empty_since and self._room(one) > 0
        ]
        whole = sum(self._weights[one] for one in active)
        size = self._size if self._is_first_round else self._left
        for one in active:
            before = self._shares.credit[one] - self._taken[one] if self._is_first_round else 0.0
            self._due[one] = before + size * self._weights[one] / whole
        self._is_first_round = False

    def _ask_quiet(self, *, ahead: bool) -> Ask | None:
        """Ask those that seemed empty, all in one claim; ahead of the others for no more than their share."""
        quiet = [one for one in self._quiet if self._room(one) > 0]
        self._quiet = []
        if not quiet:
            return None
        limit = min(self._left, *(self._room(one) for one in quiet))
        if ahead:
            share = sum(self._weights[one] for one in quiet) / sum(self._weights.values())
            limit = min(limit, max(LEAST, ceil(self._left * share)))
        return self._ask(tuple(quiet), limit)

    def _ask(self, asked: tuple[Queues, ...], limit: int) -> Ask:
        self._asked, self._limit = asked, limit
        return Ask(tuple(queue for queues in asked for queue in queues), limit)

    def took(self, found: Mapping[str, int]) -> None:
        """Take in what the last claim found of each queue."""
        total = sum(found.values())
        self._left -= total
        for queues in self._asked:
            self._taken[queues] += sum(found.get(queue, 0) for queue in queues)
            if total < self._limit:
                self._shares.empty_since[queues] = self._now
            elif total:
                self._shares.empty_since.pop(queues, None)

    def close(self) -> None:
        """Write down who is behind by how much: among those that could have taken more."""
        shares = self._shares
        open_ = [
            one for one in self._weights if one not in shares.empty_since and self._room(one) > 0
        ]
        credit = {one: shares.credit[one] - self._taken[one] for one in open_}
        whole = sum(self._weights[one] for one in open_)
        missing = sum(credit.values())
        for one in self._weights:
            part = self._weights[one] / whole if one in credit else 0.0
            shares.credit[one] = credit[one] - missing * part if one in credit else 0.0
