"""Where a worker's reading of each lane has got to, so that no claim walks over dead entries."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

PASS_AFTER = 1.0  # seconds an open transaction may hold the lower bound of every lane


class Key(NamedTuple):
    """A position in a lane: the transaction that made a row ready, and a number within it."""

    x: int
    n: int


BEGINNING = Key(0, -1)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Which transactions were still open: below `xmax` exactly those in `open`."""

    xmax: int
    open: frozenset[int]

    @classmethod
    def parse(cls, text: str) -> "Snapshot":
        """Read PostgreSQL's `xmin:xmax:open,open,…`."""
        _, xmax, running = text.split(":")
        return cls(int(xmax), frozenset(int(xid) for xid in running.split(",") if xid))


class LaneRead(NamedTuple):
    """What a claim says of one lane: the last row taken in order, and whether it saw the end."""

    lane: int
    last: Key | None
    to_end: bool


class LaneCursors:
    """The lower bound of each lane, for one reader.

    A claim starts behind its bound. No row may ever be committed below it, so it stays below
    every transaction that is still open; one that holds it for over a second is passed, and
    remembered: once it has ended, its rows are asked for by name (`late`) in each lane whose
    bound had passed it. What was skipped because somebody held it, and then let go, is found
    by looking behind the bounds now and then (`behind`, `lower`).
    """

    def __init__(self) -> None:
        self._bounds: dict[int, Key] = {}
        self._part_of: dict[int, Hashable] = {}  # which part of its lanes a lane was last read with
        self._first_seen: dict[int, float] = {}
        self._passed: set[int] = set()
        self._late: dict[int, set[int]] = {}  # ended transaction → lanes still to be asked
        self._behind: dict[int, Key] = {}
        self._lowered: dict[int, Key] = {}

    def begin(self) -> tuple[dict[int, Key], list[int]]:
        """Return what the next claim starts from: the bounds, and the late transactions.

        Lowered bounds take effect here, or the answer to a claim under way would raise them again.
        """
        self._bounds.update(self._lowered)
        self._lowered.clear()
        return self._bounds, list(self._late)

    @property
    def bounds(self) -> Mapping[int, Key]:
        """The bounds as they are, for whoever looks behind them."""
        return self._bounds

    def advance(
        self,
        snapshot: Snapshot,
        lanes: Sequence[LaneRead],
        *,
        asked_late: Sequence[int],
        now: float,
        is_whole: bool = True,
        part: Hashable | None = None,
    ) -> None:
        """Take in what a claim reported; `now` is any clock that only goes forward.

        `is_whole`: it was to read every lane, and not a single one; with `part`, every lane of that part.
        """
        for lane in lanes:
            # Late rows come first, so a row taken in order means that there are no more.
            if lane.to_end or lane.last is not None:
                for xid in asked_late:
                    self._late.get(xid, set()).discard(lane.lane)
        self._late = {xid: lanes_left for xid, lanes_left in self._late.items() if lanes_left}

        self._first_seen = {xid: self._first_seen.get(xid, now) for xid in snapshot.open}
        for xid in self._passed - snapshot.open:
            missed = {lane for lane, bound in self._bounds.items() if bound.x > xid}
            if missed:
                self._late[xid] = missed
        self._passed = {
            xid
            for xid, since in self._first_seen.items()
            if xid in self._passed or now - since >= PASS_AFTER
        }

        limit = Key(min((snapshot.open - self._passed) | {snapshot.xmax}), -1)
        for lane in lanes:
            if lane.to_end:
                reached = limit
            elif lane.last is not None:
                reached = min(lane.last, limit)
            else:
                continue
            self._bounds[lane.lane] = max(self._bounds.get(lane.lane, BEGINNING), reached)
        if is_whole:
            self._note_part(lanes, part)

    def _note_part(self, read: Sequence[LaneRead], part: Hashable | None) -> None:
        lanes = {lane.lane for lane in read}
        if part is not None:
            self._part_of.update(dict.fromkeys(lanes, part))
        if all(lane.to_end for lane in read):
            self._forget_all_but(lanes, part)

    def _forget_all_but(self, lanes: set[int], part: Hashable | None) -> None:
        """Drop what is known of lanes that a claim no longer reads: retired, or of a paused queue.

        One that comes back is read from its beginning. Lanes of other parts are read by other claims.
        """
        if part is not None:
            lanes = lanes | {lane for lane in self._bounds if self._part_of.get(lane) != part}
        if len(self._bounds) > len(lanes):
            self._part_of = {lane: of for lane, of in self._part_of.items() if lane in lanes}
            self._bounds = {lane: key for lane, key in self._bounds.items() if lane in lanes}
            self._late = {xid: left & lanes for xid, left in self._late.items() if left & lanes}

    def lower(self, found: dict[int, Key]) -> bool:
        """Take in rows seen behind the bounds; true if any should be looked for again soon.

        A row seen once may just be held by a claim under way. One seen twice was let go.
        """
        for lane, key in found.items():
            if self._behind.get(lane) == key:
                self._lowered[lane] = Key(key.x, key.n - 1)
        seen_before = self._behind
        self._behind = found
        return any(seen_before.get(lane) != key for lane, key in found.items())
