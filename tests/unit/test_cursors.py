"""A reader that starts each lane where it left off still reads every row, and each one once."""

import os
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from windlass.store.postgres.cursors import (
    BEGINNING,
    PASS_AFTER,
    Key,
    LaneCursors,
    LaneRead,
    Snapshot,
)

LANE = 7
EXAMPLES = int(os.environ.get("CURSOR_EXAMPLES", "150"))


def snapshot(xmax: int, *still_open: int) -> Snapshot:
    return Snapshot(xmax, frozenset(still_open))


def read(cursors: LaneCursors, seen: Snapshot, now: float, *lanes: LaneRead) -> None:
    """One claim: begin, and take in what it reported."""
    _, late = cursors.begin()
    cursors.advance(seen, lanes, asked_late=late, now=now)


def bound(cursors: LaneCursors) -> Key:
    return cursors.begin()[0].get(LANE, BEGINNING)


# The rules, one by one


def test_a_snapshot_is_read_from_its_text() -> None:
    assert Snapshot.parse("10:20:10,14,15") == snapshot(20, 10, 14, 15)
    assert Snapshot.parse("20:20:") == snapshot(20)


def test_a_lane_is_read_from_its_beginning_at_first() -> None:
    assert LaneCursors().begin() == ({}, [])


def test_the_bound_is_the_last_key_claimed() -> None:
    cursors = LaneCursors()

    read(cursors, snapshot(20), 0.0, LaneRead(LANE, Key(11, 3), to_end=False))

    assert bound(cursors) == Key(11, 3)


def test_the_bound_of_a_lane_read_to_its_end_is_the_next_transaction() -> None:
    cursors = LaneCursors()

    read(cursors, snapshot(20), 0.0, LaneRead(LANE, Key(11, 3), to_end=True))

    assert bound(cursors) == Key(20, -1)


@pytest.mark.parametrize("to_end", [False, True])
def test_the_bound_stays_below_every_open_transaction(to_end: bool) -> None:
    cursors = LaneCursors()

    read(cursors, snapshot(20, 9, 15), 0.0, LaneRead(LANE, Key(11, 3), to_end=to_end))

    assert bound(cursors) == Key(9, -1)


def test_the_bound_never_falls_by_itself() -> None:
    cursors = LaneCursors()
    read(cursors, snapshot(20), 0.0, LaneRead(LANE, Key(11, 3), to_end=True))

    read(cursors, snapshot(19, 8), 0.0, LaneRead(LANE, Key(9, 1), to_end=False))

    assert bound(cursors) == Key(20, -1)


def test_a_lane_that_was_not_read_keeps_its_bound() -> None:
    cursors = LaneCursors()
    read(cursors, snapshot(20), 0.0, LaneRead(LANE, Key(11, 3), to_end=False))

    read(cursors, snapshot(30), 0.0, LaneRead(LANE, None, to_end=False))

    assert bound(cursors) == Key(11, 3)


def test_a_claim_for_a_part_forgets_only_lanes_of_that_part() -> None:
    cursors = LaneCursors()
    for part, lanes in (("a", (1, 2)), ("b", (3,))):
        reads = [LaneRead(lane, None, to_end=True) for lane in lanes]
        cursors.advance(snapshot(20), reads, asked_late=[], now=0.0, part=part)
    named = [LaneRead(4, None, to_end=True)]
    cursors.advance(snapshot(20), named, asked_late=[], now=0.0, is_whole=False)

    cursors.advance(
        snapshot(30), [LaneRead(1, None, to_end=True)], asked_late=[], now=0.0, part="a"
    )

    assert cursors.begin()[0] == {
        1: Key(30, -1),
        3: Key(20, -1),
        4: Key(20, -1),
    }


def test_an_open_transaction_holds_the_bound_for_a_second() -> None:
    cursors = LaneCursors()
    bounds = []

    for now in (0.0, 0.5 * PASS_AFTER, 0.99 * PASS_AFTER, PASS_AFTER):
        read(cursors, snapshot(20, 9), now, LaneRead(LANE, Key(11, 3), to_end=False))
        bounds.append(bound(cursors))

    assert bounds == [Key(9, -1)] * 3 + [Key(11, 3)]


def test_a_passed_transaction_is_asked_for_once_it_has_ended() -> None:
    cursors = LaneCursors()
    for now in (0.0, PASS_AFTER):
        read(cursors, snapshot(20, 9), now, LaneRead(LANE, Key(11, 3), to_end=False))
    assert cursors.begin()[1] == []

    read(cursors, snapshot(21), 2.0, LaneRead(LANE, Key(12, 1), to_end=False))

    assert cursors.begin()[1] == [9]


def test_a_late_transaction_is_asked_for_until_the_lane_comes_back_short() -> None:
    cursors = LaneCursors()
    for now in (0.0, PASS_AFTER):
        read(cursors, snapshot(20, 9), now, LaneRead(LANE, Key(11, 3), to_end=False))
    read(cursors, snapshot(21), 2.0, LaneRead(LANE, Key(12, 1), to_end=False))

    # Late rows come first: a full claim that took none in order may have left some.
    read(cursors, snapshot(21), 2.0, LaneRead(LANE, None, to_end=False))
    assert cursors.begin()[1] == [9]
    read(cursors, snapshot(21), 2.0, LaneRead(LANE, Key(12, 2), to_end=False))
    assert cursors.begin()[1] == []


def test_a_late_transaction_is_asked_for_in_each_lane_that_passed_it() -> None:
    cursors = LaneCursors()
    lanes = [LaneRead(lane, Key(11, lane), to_end=False) for lane in (1, 2)]
    for now in (0.0, PASS_AFTER):
        read(cursors, snapshot(20, 9), now, *lanes)
    read(cursors, snapshot(21), 2.0, *lanes)

    read(cursors, snapshot(21), 2.0, LaneRead(1, Key(11, 5), to_end=False))
    assert cursors.begin()[1] == [9]
    read(cursors, snapshot(21), 2.0, LaneRead(2, Key(11, 5), to_end=False))
    assert cursors.begin()[1] == []


def test_lanes_that_a_claim_of_all_there_is_did_not_read_are_forgotten() -> None:
    cursors = LaneCursors()
    lanes = [LaneRead(lane, Key(11, lane), to_end=False) for lane in (1, 2)]
    for now in (0.0, PASS_AFTER):
        read(cursors, snapshot(20, 9), now, *lanes)
    read(cursors, snapshot(21), 2.0, *lanes)

    read(cursors, snapshot(21), 2.0, LaneRead(1, Key(11, 5), to_end=False))
    assert set(cursors.begin()[0]) == {1, 2}
    read(cursors, snapshot(21), 2.0, LaneRead(1, None, to_end=True))
    assert set(cursors.begin()[0]) == {1}
    assert cursors.begin()[1] == []


def test_a_transaction_that_no_bound_had_passed_is_not_asked_for() -> None:
    cursors = LaneCursors()
    read(cursors, snapshot(20, 15), 0.0, LaneRead(LANE, Key(11, 3), to_end=False))
    read(cursors, snapshot(20, 15), PASS_AFTER, LaneRead(LANE, Key(11, 4), to_end=False))

    read(cursors, snapshot(21), 2.0, LaneRead(LANE, Key(11, 5), to_end=False))

    assert cursors.begin()[1] == []


def test_a_row_seen_behind_the_bound_once_may_only_be_held() -> None:
    cursors = LaneCursors()
    read(cursors, snapshot(20), 0.0, LaneRead(LANE, None, to_end=True))

    assert cursors.lower({LANE: Key(11, 3)})  # look again soon
    assert bound(cursors) == Key(20, -1)
    assert cursors.lower({LANE: Key(12, 1)})  # another one: that one was taken
    assert bound(cursors) == Key(20, -1)


def test_a_row_seen_behind_the_bound_twice_was_let_go() -> None:
    cursors = LaneCursors()
    read(cursors, snapshot(20), 0.0, LaneRead(LANE, None, to_end=True))

    cursors.lower({LANE: Key(11, 3)})
    assert not cursors.lower({LANE: Key(11, 3)})

    assert bound(cursors) == Key(11, 2)


def test_a_lowered_bound_is_not_raised_by_a_claim_under_way() -> None:
    cursors = LaneCursors()
    read(cursors, snapshot(20), 0.0, LaneRead(LANE, None, to_end=True))

    _, late = cursors.begin()
    cursors.lower({LANE: Key(11, 3)})
    cursors.lower({LANE: Key(11, 3)})
    cursors.advance(snapshot(25), [LaneRead(LANE, None, to_end=True)], asked_late=late, now=0.0)

    assert bound(cursors) == Key(11, 2)


# A small database, and a reader of it


@dataclass
class Database:
    """Transactions that insert rows into lanes and end in any order."""

    next_xid: int = 3
    next_n: int = 0
    open: dict[int, list[tuple[int, Key]]] = field(default_factory=dict)
    rows: set[tuple[int, Key]] = field(default_factory=set)  # committed, and not yet taken
    committed: list[tuple[int, Key]] = field(default_factory=list)
    held: set[tuple[int, Key]] = field(default_factory=set)  # by a claim that may be undone

    def begin(self) -> None:
        self.open[self.next_xid] = []
        self.next_xid += 1

    def insert(self, transaction: int, lane: int, number: int) -> None:
        if self.open:
            xid = sorted(self.open)[transaction % len(self.open)]
            ns = range(self.next_n, self.next_n + number)
            self.open[xid] += [(lane, Key(xid, n)) for n in ns]
            self.next_n += number

    def end(self, transaction: int, *, commit: bool) -> None:
        if self.open:
            xid = sorted(self.open)[transaction % len(self.open)]
            rows = self.open.pop(xid)
            if commit:
                self.rows.update(rows)
                self.committed += rows

    def snapshot(self) -> Snapshot:
        # As in PostgreSQL, xmax is above the last that has ended, not above the last that began.
        ended = [xid for xid in range(self.next_xid) if xid not in self.open]
        xmax = max(ended) + 1
        return Snapshot(xmax, frozenset(xid for xid in self.open if xid < xmax))


@dataclass
class Reader:
    """Claims as `claim_tasks` does."""

    database: Database
    cursors: LaneCursors
    now: float = 0.0
    taken: list[tuple[int, Key]] = field(default_factory=list)

    def claim(self, wanted: int, lanes: Sequence[int]) -> int:
        bounds, late = self.cursors.begin()
        seen = self.database.snapshot()
        report = []
        taken = 0
        for lane in lanes:
            if taken == wanted:
                break
            start = bounds.get(lane, BEGINNING)
            rows = sorted(key for of, key in self.database.rows if of == lane)
            free = [key for key in rows if (lane, key) not in self.database.held]
            behind = [key for key in free if key.x in late and key <= start]
            ahead = [key for key in free if key > start]
            found = (behind + ahead)[: wanted - taken]
            in_order = [key for key in found if key > start]
            last = in_order[-1] if in_order else None
            report.append(LaneRead(lane, last, to_end=len(found) < wanted - taken))
            self.database.rows.difference_update((lane, key) for key in found)
            self.taken += [(lane, key) for key in found]
            taken += len(found)
        self.cursors.advance(seen, report, asked_late=late, now=self.now)
        return taken

    def look_behind(self) -> bool:
        found = {}
        for lane, start in self.cursors.bounds.items():
            behind = [key for of, key in self.database.rows if of == lane and key <= start]
            if behind:
                found[lane] = min(behind)
        return self.cursors.lower(found)

    def drain(self, lanes: Sequence[int]) -> None:
        """Once everybody else is done: what a worker comes to in its next few claims."""
        for xid in sorted(self.database.open):
            self.database.end(xid, commit=True)
        self.database.held.clear()
        # A passed transaction is found to have ended by one claim, and asked for by the next.
        short = 0
        while short < 3:
            short = 0 if self.claim(3, lanes) else short + 1


BOTH = (0, 1)
transactions = st.integers(0, 3)
numbers = st.sampled_from([1, 2, 5])
a_lane = st.sampled_from(BOTH)
# Short lists are what a search begins with, and nothing is lost in a few steps: so turns.
writing = st.one_of(
    st.tuples(st.just("begin"), a_lane, numbers),
    st.tuples(st.just("insert"), transactions, a_lane, numbers),
)
ending = st.one_of(
    st.tuples(st.just("commit"), transactions),
    st.tuples(st.just("commit"), transactions),
    st.tuples(st.just("abort"), transactions),
)
waiting = st.tuples(st.just("wait"), st.sampled_from([0.0, 0.6, 1.1]))
claiming = st.tuples(st.just("claim"), numbers, st.sampled_from([BOTH, (1, 0), (0,)]))
turn = st.one_of(
    st.tuples(writing, writing, ending, waiting, claiming),
    st.tuples(writing, ending, claiming),
    st.tuples(waiting, claiming),
    st.tuples(ending, claiming),
)
steps = st.lists(turn, min_size=3, max_size=15).map(
    lambda turns: [step for some in turns for step in some]
)
holds = st.one_of(
    st.tuples(st.just("hold"), st.integers(0, 20)),
    st.tuples(st.just("let_go")),
    st.tuples(st.just("look_behind")),
)


def play(script: Sequence[tuple[object, ...]], cursors: LaneCursors) -> Reader:
    database = Database()
    reader = Reader(database, cursors)
    for verb, *details in script:
        match verb, details:
            case "begin", [int(lane), int(number)]:
                database.begin()
                database.insert(-1, lane, number)
            case "insert", [int(transaction), int(lane), int(number)]:
                database.insert(transaction, lane, number)
            case "commit" | "abort", [int(transaction)]:
                database.end(transaction, commit=verb == "commit")
            case "claim", [int(wanted), tuple(lanes)]:
                reader.claim(wanted, lanes)
            case "wait", [float(seconds)]:
                reader.now += seconds
            case "hold", [int(place)]:
                database.held.update(sorted(database.rows)[place : place + 2])
            case "let_go", []:
                database.held.clear()
            case "look_behind", []:
                reader.look_behind()
            case _:
                raise AssertionError(verb)
    reader.drain(BOTH)
    return reader


@settings(max_examples=EXAMPLES)
@given(steps)
def test_every_committed_row_is_read_exactly_once(script: list[tuple[object, ...]]) -> None:
    reader = play(script, LaneCursors())

    assert sorted(reader.taken) == sorted(reader.database.committed)


@settings(max_examples=EXAMPLES)
@given(st.lists(st.one_of(steps.map(lambda some: some[:8]), holds.map(lambda one: [one]))))
def test_every_row_that_was_held_and_let_go_is_read_exactly_once(
    script: list[list[tuple[object, ...]]],
) -> None:
    reader = play([step for some in script for step in some], LaneCursors())

    # Each look behind finds the first row of a lane, and the next claim goes on from there.
    for _ in range(2 * len(reader.database.committed)):
        reader.look_behind()
        reader.drain(BOTH)

    assert sorted(reader.taken) == sorted(reader.database.committed)


@given(steps)
def test_the_rows_of_a_lane_are_read_in_order_unless_they_were_passed(
    script: list[tuple[object, ...]],
) -> None:
    patient = [step for step in script if step[0] != "wait"]

    reader = play(patient, LaneCursors())

    for lane in BOTH:
        keys = [key for of, key in reader.taken if of == lane]
        # What came late was still open when its successors were taken.
        for place, key in enumerate(keys):
            assert all(later > key or later.x < key.x for later in keys[place + 1 :])


# Mutants: the rules are there because rows are lost without them


class AboveXmin(LaneCursors):
    """Takes the last key claimed for a bound, whoever is still open."""

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
        super().advance(
            Snapshot(snapshot.xmax, frozenset()),
            lanes,
            asked_late=asked_late,
            now=now,
            is_whole=is_whole,
            part=part,
        )


class NeverAsksForLate(LaneCursors):
    """Passes an open transaction and forgets it."""

    def begin(self) -> tuple[dict[int, Key], list[int]]:
        return super().begin()[0], []


class AboveXmax(LaneCursors):
    """Takes a lane that came back short for read up to whatever may have begun since."""

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
        further = Snapshot(snapshot.xmax + 2, snapshot.open)
        super().advance(
            further, lanes, asked_late=asked_late, now=now, is_whole=is_whole, part=part
        )


class AsksOnce(LaneCursors):
    """Asks for a late transaction once, although one claim may not hold all of its rows."""

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
        super().advance(
            snapshot, lanes, asked_late=asked_late, now=now, is_whole=is_whole, part=part
        )
        for xid in asked_late:
            self._late.pop(xid, None)


LATE_COMMIT = [
    ("begin", 0, 1),
    ("begin", 0, 1),
    ("commit", 1),
    ("claim", 4, BOTH),
    ("commit", 0),
]
PASSED = [
    ("begin", 0, 9),
    ("begin", 0, 4),
    ("commit", 1),
    ("claim", 1, BOTH),
    ("wait", 1.1),
    ("claim", 1, BOTH),
    ("commit", 0),
    ("claim", 1, BOTH),
]
NOT_YET_BEGUN = [("claim", 1, BOTH), ("begin", 0, 1), ("commit", 0)]


@pytest.mark.parametrize(
    ("mutant", "script"),
    [
        (AboveXmin, LATE_COMMIT),
        (NeverAsksForLate, PASSED),
        (AsksOnce, PASSED),
        (AboveXmax, NOT_YET_BEGUN),
    ],
)
def test_without_each_rule_rows_are_lost(
    mutant: type[LaneCursors], script: list[tuple[object, ...]]
) -> None:
    kept, lost = play(script, LaneCursors()), play(script, mutant())

    assert sorted(kept.taken) == sorted(kept.database.committed)
    assert set(lost.taken) < set(lost.database.committed)


@pytest.mark.parametrize("mutant", [AboveXmin, NeverAsksForLate, AsksOnce, AboveXmax])
def test_the_search_would_find_each_loss(mutant: type[LaneCursors]) -> None:
    def loses(script: list[tuple[object, ...]]) -> bool:
        reader = play(script, mutant())
        return sorted(reader.taken) != sorted(reader.database.committed)

    search = settings(max_examples=5000, database=None, phases=[Phase.generate])
    find(steps, loses, settings=search)
