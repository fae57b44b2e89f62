"""A store's clock that jumps is noticed; one that only answers slowly is not accused."""

from datetime import UTC, datetime, timedelta

import pytest

from unit.moved_clock import MovedClock
from windlass.store import clock_watch
from windlass.store.clock_watch import ClockWatch

LEASE = timedelta(seconds=30)
HEARTBEAT = timedelta(seconds=12)


class Clocks:
    """The store's clock and ours; an answer may take long, before or after it is looked up."""

    def __init__(self) -> None:
        self.ours = MovedClock()
        self.stores = datetime(2027, 3, 3, tzinfo=UTC)
        self.before = self.after = 0.0
        self.watch = ClockWatch(lease=LEASE, heartbeat=HEARTBEAT)

    def pass_by(self, seconds: float) -> None:
        self.ours.now += seconds
        self.stores += timedelta(seconds=seconds)

    def jump(self, seconds: float) -> None:
        self.stores += timedelta(seconds=seconds)

    async def now(self) -> datetime:
        self.pass_by(self.before)
        now = self.stores
        self.pass_by(self.after)
        return now

    async def look(self) -> bool:
        return await self.watch.look(self)


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    clocks = Clocks()
    monkeypatch.setattr(clock_watch, "time", clocks.ours)
    return clocks


async def test_a_clock_that_goes_as_ours_is_believed(
    clocks: Clocks, caplog: pytest.LogCaptureFixture
) -> None:
    await clocks.look()
    for seconds in (15, 5, 600):
        clocks.pass_by(seconds)
        assert await clocks.look()

    assert caplog.messages == []


@pytest.mark.parametrize("seconds", [300, -300])
async def test_after_a_jump_no_lease_is_believed_to_be_over_for_the_length_of_one(
    clocks: Clocks, caplog: pytest.LogCaptureFixture, seconds: int
) -> None:
    await clocks.look()
    clocks.pass_by(10)
    clocks.jump(seconds)

    assert not await clocks.look()
    clocks.pass_by(29)
    assert not await clocks.look()
    clocks.pass_by(1)
    assert await clocks.look()
    assert caplog.messages == [f"clock.jumped seconds={seconds:.1f}"]


async def test_the_doubt_lasts_a_lease_from_the_answer_that_showed_the_jump(clocks: Clocks) -> None:
    await clocks.look()
    clocks.jump(300)
    clocks.after = 10.0
    await clocks.look()
    clocks.after = 0.0
    clocks.pass_by(29)
    assert not await clocks.look()


@pytest.mark.parametrize(
    ("seconds", "is_told"), [(1.5, False), (3, True), (-1.5, False), (-3, True)]
)
async def test_a_clock_that_is_set_right_by_a_moment_has_not_jumped(
    clocks: Clocks, caplog: pytest.LogCaptureFixture, seconds: float, is_told: bool
) -> None:
    await clocks.look()
    clocks.jump(seconds)
    await clocks.look()

    assert bool(caplog.messages) == is_told


@pytest.mark.parametrize("slow", ["before", "after"])
async def test_an_answer_that_took_long_is_no_jump(
    clocks: Clocks, caplog: pytest.LogCaptureFixture, slow: str
) -> None:
    await clocks.look()
    clocks.pass_by(10)
    setattr(clocks, slow, 20.0)
    assert await clocks.look()
    setattr(clocks, slow, 0.0)
    assert await clocks.look()

    assert caplog.messages == []


async def test_how_long_a_clock_was_steady_is_counted_from_the_first_look_to_the_last(
    clocks: Clocks,
) -> None:
    clocks.pass_by(100)
    assert clocks.watch.steady_for == timedelta(0)
    await clocks.look()
    clocks.pass_by(20)
    await clocks.look()
    clocks.pass_by(20)

    assert clocks.watch.steady_for == timedelta(seconds=20)


@pytest.mark.parametrize("seconds", [300, -300])
async def test_a_clock_that_jumped_has_to_prove_itself_anew(clocks: Clocks, seconds: int) -> None:
    await clocks.look()
    clocks.pass_by(100)
    clocks.jump(seconds)
    await clocks.look()
    assert clocks.watch.steady_for == timedelta(0)
    clocks.pass_by(10)
    await clocks.look()

    assert clocks.watch.steady_for == timedelta(seconds=10)


async def test_a_slow_answer_proves_nothing_of_how_long_the_clock_was_steady(
    clocks: Clocks,
) -> None:
    """A step that is as long as the answer took could hide in it."""
    await clocks.look()
    clocks.pass_by(100)
    clocks.after = 0.6
    await clocks.look()
    assert clocks.watch.steady_for == timedelta(0)
    clocks.after = 0.4
    clocks.pass_by(10)
    await clocks.look()

    assert clocks.watch.steady_for == timedelta(seconds=10)


async def test_whoever_has_just_begun_to_look_believes_nothing_until_the_others_have_beaten(
    clocks: Clocks, caplog: pytest.LogCaptureFixture
) -> None:
    """It may have missed a jump."""
    assert not await clocks.look()
    clocks.pass_by(12.4)
    assert not await clocks.look()
    clocks.pass_by(0.1)
    assert await clocks.look()

    assert caplog.messages == []
