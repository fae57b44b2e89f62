"""When a leader's chores are done again: at once if there is more to do, else in their own time."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest

from unit.moved_clock import MovedClock
from windlass.maintenance import chores as chores_module
from windlass.maintenance.chores import RESCUE_BATCH, Chore, chores
from windlass.model.limits import PROMOTE_BATCH
from windlass.model.task import Due, Leadership, Rescued, Retained
from windlass.store import clock_watch
from windlass.store.clock_watch import ClockWatch
from windlass.store.memory import MemoryStore

HELD = Leadership(UUID(int=1), 1)
LEASE = timedelta(seconds=30)
SWEEP = 5.0
EVERY = {"rescue": SWEEP, "promote": SWEEP, "remove-workers": SWEEP, "retain": 600.0}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> MovedClock:
    clock = MovedClock()
    monkeypatch.setattr(chores_module, "time", clock)
    return clock


class _Answers(MemoryStore):
    """A store whose chores are answered as the test says."""

    def __init__(self, method: str, answer: Any) -> None:
        super().__init__()
        self.asked = 0

        async def tell(*_: object, **__: object) -> Any:
            self.asked += 1
            return answer

        setattr(self, method, tell)


class _Watch(ClockWatch):
    def __init__(self, *, is_believed: bool = True) -> None:
        super().__init__(lease=LEASE, heartbeat=LEASE / 3)
        self._is_believed = is_believed

    async def look(self, _: object) -> bool:
        return self._is_believed


def chore_of(store: MemoryStore, name: str, watch: ClockWatch | None = None) -> Chore:
    (found,) = [one for one in chores(store, watch or _Watch(), sweep=SWEEP) if one.name == name]
    return found


@pytest.mark.parametrize(
    ("name", "answer", "is_more"),
    [
        ("rescue", Rescued(claims=RESCUE_BATCH), True),
        ("rescue", Rescued(claims=RESCUE_BATCH - 1), False),
        ("promote", PROMOTE_BATCH, True),
        ("promote", PROMOTE_BATCH - 1, False),
        ("retain", Retained(partitions=1), True),
        ("retain", Retained(dead=1), True),
        ("retain", Retained(waiting=("history_20270303_20270304",)), False),
        ("retain", Retained(), False),
    ],
)
async def test_a_chore_that_has_more_to_do_is_due_at_once(
    clock: MovedClock, name: str, answer: object, is_more: bool
) -> None:
    chore = chore_of(_Answers(name, answer), name)
    await chore.run(HELD)

    assert chore.due_at == clock.now + (0 if is_more else EVERY[name])


async def test_no_worker_is_removed_while_the_clock_is_in_doubt() -> None:
    store = _Answers("remove_dead_workers", [])
    await chore_of(store, "remove-workers", _Watch(is_believed=False)).run(HELD)
    assert store.asked == 0

    await chore_of(store, "remove-workers").run(HELD)
    assert store.asked == 1


class _Looked(MemoryStore):
    """A store that says what is due, and remembers what it was asked for."""

    def __init__(self, **due: bool) -> None:
        super().__init__()
        self.looks = 0
        self.asked: list[str] = []
        self._due = due
        for method, answer in (
            ("rescue", Rescued()),
            ("promote", 0),
            ("expire", 0),
            ("remove_dead_workers", []),
            ("tidy", 0),
        ):
            setattr(self, method, self._telling(method, answer))

    def _telling(self, method: str, answer: Any) -> Callable[..., Awaitable[Any]]:
        async def tell(**_: object) -> Any:
            self.asked.append(method)
            return answer

        async def tell_limited(_: int, **options: object) -> Any:
            return await tell(**options)

        return tell_limited if method in {"rescue", "promote", "expire"} else tell

    async def due(self) -> Due:
        self.looks += 1
        kinds = ("claims", "scheduled", "silent_workers", "leftovers", "expiring")
        found = {kind: self._due.get(kind, False) for kind in kinds}
        return Due(await self.now(), schedule_in=None, **found)


async def swept(store: MemoryStore, clock: MovedClock, turns: int = 1) -> None:
    """Do every chore of a sweep, so often, with a watch that has seen enough of the clock."""
    watch = ClockWatch(lease=LEASE, heartbeat=LEASE / 3)
    watch._last = clock_watch._Reading(await store.now(), 0.0, 0.0)
    todo = [one for one in chores(store, watch, sweep=SWEEP) if one.every <= 2 * SWEEP]
    for _ in range(turns):
        for chore in todo:
            await chore.run(HELD)
        clock.now += SWEEP


@pytest.mark.parametrize(
    ("due", "asked"),
    [
        ("claims", "rescue"),
        ("scheduled", "promote"),
        ("silent_workers", "remove_dead_workers"),
        ("leftovers", "tidy"),
    ],
)
async def test_what_a_look_finds_is_done(
    clock: MovedClock, monkeypatch: pytest.MonkeyPatch, due: str, asked: str
) -> None:
    monkeypatch.setattr(ClockWatch, "_compare", lambda *_: None)
    store = _Looked(**{due: True})
    await swept(store, clock, turns=2)

    assert store.asked.count(asked) == 2
    assert set(store.asked) <= {asked, "tidy"}


async def test_one_look_is_enough_for_all_chores_of_a_sweep(
    clock: MovedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ClockWatch, "_compare", lambda *_: None)
    store = _Looked()
    await swept(store, clock, turns=10)

    assert store.looks == 10
    assert store.asked == ["tidy"]  # what no look sees is tidied now and then


def taking(clock: MovedClock, seconds: float) -> Callable[[Leadership], Awaitable[bool]]:
    async def call(_: Leadership) -> bool:
        clock.now += seconds
        return False

    return call


@pytest.mark.parametrize(("took", "due_after"), [(0.1, SWEEP), (1.0, 20.0)])
async def test_a_chore_that_takes_long_is_done_less_often(
    clock: MovedClock, took: float, due_after: float
) -> None:
    began = clock.now
    chore = Chore("long", SWEEP, taking(clock, took), at_most=1 / 20)
    await chore.run(HELD)

    assert chore.due_at == pytest.approx(began + due_after)


async def test_a_chore_that_fails_is_not_tried_again_at_once(clock: MovedClock) -> None:
    async def fail(_: Leadership) -> bool:
        raise LookupError

    chore = Chore("fails", SWEEP, fail)
    with pytest.raises(LookupError):
        await chore.run(HELD)

    assert not chore.is_due(clock.now)
    assert chore.is_due(clock.now + SWEEP)


async def test_a_chore_that_was_given_up_is_done_less_often_too(clock: MovedClock) -> None:
    async def overrun(_: Leadership) -> bool:
        clock.now += 5
        raise asyncio.CancelledError

    began = clock.now
    chore = Chore("overruns", SWEEP, overrun, at_most=1 / 20)
    with pytest.raises(asyncio.CancelledError):
        await chore.run(HELD)

    assert chore.due_at == pytest.approx(began + 100)


def test_a_leader_is_not_judged_by_how_it_counts_or_cares_for_the_dead() -> None:
    all_of_them = chores(MemoryStore(), _Watch(), sweep=SWEEP, unknown_type_grace=60.0)
    optional = [one.name for one in all_of_them if not one.is_duty]

    assert optional == ["replay-dead", "remove-dead", "fail-unknown", "count"]


def test_types_that_nobody_knows_are_not_looked_for_unless_that_is_asked_for() -> None:
    names = [one.name for one in chores(MemoryStore(), _Watch(), sweep=SWEEP)]

    assert "fail-unknown" not in names
