"""How long a type has to be unknown, in the eyes of one leader, before its tasks fail."""

import json
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest

from unit.moved_clock import MovedClock
from windlass.maintenance import unknown as unknown_module
from windlass.maintenance.unknown import UnknownTypes
from windlass.model.limits import PROMOTE_BATCH
from windlass.model.task import Due, Leadership
from windlass.store.memory import MemoryStore

HELD = Leadership(UUID(int=1), 1)
EVERY = 5.0
GRACE = 60.0
TURNS = int(GRACE / EVERY)


class _Store:
    """Says which types are unknown, and remembers which it was to fail."""

    def __init__(self, clock: MovedClock, *types: str) -> None:
        self._clock = clock
        self.types = list(types)
        self.answers_within = 0.0  # seconds
        self.failed: list[str] = []
        self.asked: dict[str, Any] = {}
        self.answer = [UUID(int=7)]
        self.answers: dict[str, list[UUID]] = {}  # of types for which it is another one

    async def unknown_types(self) -> list[str]:
        self._clock.now += self.answers_within
        return self.types

    async def fail_unknown(self, type: str, **asked: Any) -> list[UUID]:  # noqa: A002
        self.failed.append(type)
        self.asked = asked
        return self.answers.get(type, self.answer)


class _Look:
    is_believed = True

    async def look(self) -> tuple[Due, bool]:
        return Due(await MemoryStore().now()), self.is_believed


class _Bench:
    def __init__(self, clock: MovedClock, *types: str) -> None:
        self.clock = clock
        self.store = _Store(clock, *types)
        self.look = _Look()
        self.died: list[UUID] = []
        self._chore = UnknownTypes(
            self.store, self.look, grace=GRACE, every=EVERY, died=self.died.extend
        )

    async def turns(self, number: int, leadership: Leadership = HELD) -> bool:
        has_more = False
        for _ in range(number):
            self.clock.now += EVERY
            has_more = await self._chore(leadership)
        return has_more


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> MovedClock:
    clock = MovedClock()
    clock.now = float(int(clock.now))  # so that whole seconds add up, whatever the time is
    monkeypatch.setattr(unknown_module, "time", clock)
    return clock


@pytest.fixture
def bench(clock: MovedClock) -> _Bench:
    return _Bench(clock, "lost")


async def test_a_type_fails_once_it_was_unknown_for_the_grace_and_not_before(
    bench: _Bench, caplog: pytest.LogCaptureFixture
) -> None:
    await bench.turns(TURNS)
    assert bench.store.failed == []

    await bench.turns(1)

    assert bench.store.failed == ["lost"]
    assert bench.store.asked["ready_for"] == timedelta(seconds=GRACE)
    assert bench.store.asked["leadership"] == HELD
    assert bench.store.asked["limit"] == PROMOTE_BATCH
    error = json.loads(bench.store.asked["error"])
    assert (error["type"], error["class"]) == ("UnknownTask", "code-bug")
    for said in ("'lost'", "60 s", "start a worker", "correct the name"):
        assert said in error["message"]
    assert bench.died == [UUID(int=7)]
    (line,) = [each.getMessage() for each in caplog.records]
    assert line == "task.unknown_type type=lost tasks=1 grace=60s"


async def test_a_worker_that_came_for_a_moment_starts_the_count_anew(bench: _Bench) -> None:
    await bench.turns(TURNS)
    bench.store.types = []
    await bench.turns(1)
    bench.store.types = ["lost"]

    await bench.turns(TURNS)
    assert bench.store.failed == []
    await bench.turns(1)
    assert bench.store.failed == ["lost"]


@pytest.mark.parametrize("other", [Leadership(UUID(int=1), 2), Leadership(UUID(int=2), 1)])
async def test_another_leadership_starts_the_count_anew(bench: _Bench, other: Leadership) -> None:
    await bench.turns(TURNS)

    await bench.turns(TURNS, other)
    assert bench.store.failed == []
    await bench.turns(1, other)
    assert bench.store.failed == ["lost"]


async def test_a_clock_in_doubt_starts_the_count_anew(bench: _Bench) -> None:
    await bench.turns(TURNS)
    bench.look.is_believed = False
    await bench.turns(100)
    assert bench.store.failed == []
    bench.look.is_believed = True

    await bench.turns(TURNS)
    assert bench.store.failed == []
    await bench.turns(1)
    assert bench.store.failed == ["lost"]


async def test_what_nobody_looked_at_does_not_count(bench: _Bench, clock: MovedClock) -> None:
    await bench.turns(1)
    clock.now += 3600.0
    await bench.turns(1)
    assert bench.store.failed == []

    await bench.turns(TURNS - 2)  # the long pause counts as two turns
    assert bench.store.failed == ["lost"]


async def test_the_time_that_the_store_takes_to_answer_does_not_count(bench: _Bench) -> None:
    bench.store.answers_within = EVERY

    await bench.turns(TURNS)
    assert bench.store.failed == []
    await bench.turns(1)
    assert bench.store.failed == ["lost"]


async def test_each_type_has_its_own_count(bench: _Bench) -> None:
    await bench.turns(5)
    bench.store.types = ["astray", "lost"]

    await bench.turns(TURNS - 4)
    assert bench.store.failed == ["lost"]
    await bench.turns(5)
    assert bench.store.failed.count("astray") == 1


async def test_a_full_batch_means_that_there_may_be_more(bench: _Bench) -> None:
    await bench.turns(TURNS)
    bench.store.answer = [UUID(int=n) for n in range(PROMOTE_BATCH)]
    assert await bench.turns(1) is True
    bench.store.answer = []
    assert await bench.turns(1) is False


async def test_a_full_batch_of_one_type_means_so_whatever_is_left_of_the_others(
    clock: MovedClock,
) -> None:
    bench = _Bench(clock, "astray", "lost")
    bench.store.answers = {"astray": [UUID(int=n) for n in range(PROMOTE_BATCH)]}

    assert await bench.turns(TURNS + 1) is True
    assert bench.store.failed == ["astray", "lost"]


async def test_nothing_is_said_if_nothing_failed(
    bench: _Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.store.answer = []
    await bench.turns(TURNS + 1)

    assert bench.store.failed == ["lost"]
    assert (bench.died, caplog.records) == ([], [])
