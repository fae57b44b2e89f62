"""Rules of a proxy: at which point what happens to a connection."""

import asyncio
from collections import Counter
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from faults.messages import COMMIT, SHOWN_BY, Message, When

if TYPE_CHECKING:
    from faults.carrying import Connection


@dataclass(frozen=True, slots=True)
class Point:
    """A moment: the n-th message of a kind, and which side of it."""

    when: When
    kind: str
    number: int = 1

    def __str__(self) -> str:
        return f"{self.when.value}-{self.kind}-{self.number}"


def before(kind: str, number: int = 1) -> Point:
    """The server never gets the n-th message of this kind."""
    return Point(When.BEFORE, kind, number)


def after(kind: str, number: int = 1) -> Point:
    """The server has carried out the n-th message of this kind, and the client is not told."""
    return Point(When.AFTER, kind, number)


def reply(kind: str, number: int = 1) -> Point:
    """The n-th answer of this kind does not reach the client."""
    return Point(When.REPLY, kind, number)


class Effect(Enum):
    """What happens at a point."""

    CUT = "cut"  # both sides are closed at once
    DELAY = "delay"  # goes on after a while
    STALL = "stall"  # goes on when released
    HALF_OPEN = "half-open"  # both sides stay open, and nothing passes any more


class Rule:
    """An effect at a point; counts from the moment it was made."""

    def __init__(
        self, point: Point, effect: Effect, *, text: str, times: int | None, delay: float
    ) -> None:
        if point.when is When.AFTER and point.kind not in {*SHOWN_BY, COMMIT}:
            raise ValueError(f"the server does not show that it has carried out {point.kind}")
        self.point = point
        self.effect = effect
        self.delay = delay
        self.reached = asyncio.Event()
        self.connections: list[Connection] = []  # that it befell
        self._text = text
        self._times = times
        self._seen = 0
        self._taken = 0  # messages that it has been chosen for
        self._released = asyncio.Event()

    def befalls(self, when: When, message: Message) -> bool:
        """Whether it happens here; counts this message if it is of the kind."""
        if when is not self.point.when or self.point.kind not in message.kinds:
            return False
        if self._text not in message.text:
            return False
        self._seen += 1
        return self._seen >= self.point.number and (
            self._times is None or self._taken < self._times
        )

    def take(self) -> None:
        """Count a message that is to undergo this: what is on its way to that is not waited for."""
        self._taken += 1

    def befell(self, connection: "Connection") -> None:
        """Note whom it befell."""
        self.connections.append(connection)
        self.reached.set()

    def release(self) -> None:
        """Let what is stalled go on, now and later."""
        self._released.set()

    async def wait(self) -> None:
        """Hold up a message for as long as the rule says."""
        if self.effect is Effect.DELAY:
            await asyncio.sleep(self.delay)
        elif self.effect is Effect.STALL:
            await self._released.wait()


class Recording:
    """The messages that passed, in order."""

    def __init__(self) -> None:
        self.seen: list[tuple[When, Message]] = []

    def points(self, about: str = "") -> list[Point]:
        """Every moment there was, of statements whose text holds `about`.

        Of a run of equal answers only the first.
        """
        counts: Counter[tuple[When, str]] = Counter()
        points, last = [], ""
        for when, message in self.seen:
            kind = message.kinds[0]
            if kind == "Terminate":
                continue
            counts[when, kind] += 1
            number = counts[when, kind]
            if about in message.text and (when is When.BEFORE or kind != last):
                points.append(Point(when, kind, number))
                if when is When.BEFORE and kind in SHOWN_BY:
                    points.append(Point(When.AFTER, kind, number))
            last = kind
        return points
