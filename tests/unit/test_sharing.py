"""Breakers that several processes share, kept in step with a store that does what the test says."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from windlass import App, Breaker, BreakerOpen
from windlass.breaker import ProtectedCall
from windlass.model.breaker import CallOutcome, SharedBreaker
from windlass.model.errors import StoreBusy, StoreUnavailable
from windlass.runtime import sharing as sharing_module
from windlass.runtime.sharing import TRIALS_LEASE, Sharing
from windlass.service import Stop
from windlass.store.memory.store import MemoryStore

RECOVERY = 30.0
FAILED, SUCCEEDED, NO_VERDICT = CallOutcome.FAILED, CallOutcome.SUCCEEDED, CallOutcome.NO_VERDICT


class Clock:
    """One time for the store and for all processes."""

    def __init__(self) -> None:
        self.seconds = 1_000_000.0

    def __call__(self) -> float:
        return self.seconds

    def as_datetime(self) -> datetime:
        return datetime.fromtimestamp(self.seconds, UTC)

    def advance(self, seconds: float) -> None:
        self.seconds += seconds


class ObservedStore(MemoryStore):
    """Counts what it is asked, and may be away, silent or held."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock=clock.as_datetime)
        self.asked: Counter[str] = Counter()
        self.probes: Counter[UUID] = Counter()
        self.error: StoreUnavailable | None = None
        self.held_names: set[str] = set()
        self.silent: dict[str, asyncio.Event] = {}  # by method: answers once this is set

    async def _observe(self, method: str, name: str = "") -> None:
        self.asked[method] += 1
        if self.error is not None:
            raise self.error
        if name in self.held_names:
            raise StoreBusy("held")

    async def _answer(self, method: str) -> None:
        if method in self.silent:
            await self.silent[method].wait()

    async def breakers(self, names: Sequence[str]) -> list[SharedBreaker]:
        await self._observe("breakers")
        await self._answer("breakers")
        return await super().breakers(names)

    async def open_breaker(self, name: str, *, epoch: int, recovery: timedelta) -> bool:
        await self._observe("open_breaker", name)
        return await super().open_breaker(name, epoch=epoch, recovery=recovery)

    async def close_breaker(self, name: str, *, epoch: int) -> bool:
        await self._observe("close_breaker", name)
        is_written = await super().close_breaker(name, epoch=epoch)
        await self._answer("close_breaker")
        return is_written

    async def probe_breaker(self, name: str, *, epoch: int, holder: UUID, lease: timedelta) -> bool:
        await self._observe("probe_breaker", name)
        self.probes[holder] += 1
        is_ours = await super().probe_breaker(name, epoch=epoch, holder=holder, lease=lease)
        await self._answer("probe_breaker")
        return is_ours


class Fleet:
    """Processes on one store, each with a breaker of the same name."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.store = ObservedStore(self.clock)
        self._stack = AsyncExitStack()

    def breaker(self, name: str = "payments", **options: Any) -> Breaker:
        given = {"failures": 1, "recovery": RECOVERY, "shared": True} | options
        breaker = App("memory:").breaker(name, **given)
        breaker.reset(self.clock)
        return breaker

    async def join(self, *breakers: Breaker, patience: float = 5.0) -> "Member":
        """Let a process begin that keeps these in step."""
        member = Member(Sharing(store=self.store, breakers=breakers, patience=patience))
        self._stack.push_async_callback(member.kill)
        await until(
            lambda: all(one.is_governed for one in breakers) or self.store.error is not None
        )
        return member

    async def known(self) -> SharedBreaker:
        (known,) = await MemoryStore.breakers(self.store, ["payments"])
        return known

    async def opened(self, *breakers: Breaker) -> None:
        """Let the first one find out, and the others follow."""
        fail(breakers[0])
        await until(lambda: all(one.state == "open" for one in breakers))
        await until(lambda: not any(one.news for one in breakers))

    async def close(self) -> None:
        await self._stack.aclose()


class Member:
    """A process that keeps breakers in step."""

    def __init__(self, sharing: Sharing) -> None:
        self._stop = Stop()
        self._running = asyncio.create_task(sharing.run(self._stop))

    async def stop(self) -> None:
        self._stop.set()
        await self._running

    async def kill(self) -> None:
        """End it without a word to the store."""
        self._running.cancel()
        await asyncio.wait([self._running])


@pytest.fixture
async def fleet(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fleet]:
    monkeypatch.setattr(sharing_module, "LOOK_EVERY", 0.005)
    fleet = Fleet()
    yield fleet
    await fleet.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


async def looked(fleet: Fleet, times: int = 3) -> None:
    """Wait until the store was looked at so many times more."""
    before = fleet.store.asked["breakers"]
    await until(lambda: fleet.store.asked["breakers"] >= before + times)


def fail(breaker: Breaker) -> None:
    breaker.begin_here().end(FAILED)


async def is_refused(breaker: Breaker) -> bool:
    try:
        call = await breaker.begin()
    except BreakerOpen:
        return True
    call.end(NO_VERDICT)
    return False


async def trial_of(breaker: Breaker) -> ProtectedCall:
    async with asyncio.timeout(20):
        return await breaker.begin()


# What was found out


async def test_calls_through_a_closed_circuit_cost_no_statement(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing_module, "LOOK_EVERY", 1000)
    breaker = fleet.breaker(failures=5)
    await fleet.join(breaker)

    for outcome in [FAILED, SUCCEEDED] * 50:
        (await breaker.begin()).end(outcome)
    await asyncio.sleep(0.02)

    assert fleet.store.asked == {"breakers": 1}


async def test_of_two_that_find_out_at_once_both_follow_one(fleet: Fleet) -> None:
    mine, other = fleet.breaker(), fleet.breaker()
    await fleet.join(mine)
    await fleet.join(other)

    fail(mine)
    fail(other)
    await looked(fleet, 6)

    assert (await fleet.known()).epoch == 1
    assert (mine.half_open_in, other.half_open_in) == (RECOVERY, RECOVERY)
    assert (mine.news, other.news) == (None, None)


async def test_who_opens_it_says_for_how_long(fleet: Fleet) -> None:
    mine, other = fleet.breaker(recovery=100), fleet.breaker(recovery=5)
    await fleet.join(mine)
    await fleet.join(other)

    await fleet.opened(mine, other)

    assert other.half_open_in == 100


async def test_what_was_found_out_while_the_store_was_away_is_told_later_with_the_time_that_is_left(
    fleet: Fleet,
) -> None:
    mine, other = fleet.breaker(), fleet.breaker()
    await fleet.join(mine)
    await fleet.join(other)
    fleet.store.error = StoreUnavailable("away")
    await until(lambda: not mine.is_governed and not other.is_governed)

    fail(mine)
    fleet.clock.advance(RECOVERY - 10)
    assert other.state == "closed"
    fleet.store.error = None
    await until(lambda: other.state == "open")

    assert other.half_open_in == 10


async def test_what_came_to_be_known_elsewhere_meanwhile_counts_more(fleet: Fleet) -> None:
    mine, other = fleet.breaker(), fleet.breaker()
    member = await fleet.join(mine)
    await fleet.join(other)
    await member.stop()
    await fleet.opened(other)
    fleet.clock.advance(RECOVERY)
    (await trial_of(other)).end(SUCCEEDED)
    await until(lambda: other.news is None)

    fail(mine)
    await fleet.join(mine)
    await until(lambda: mine.state == "closed")

    assert await fleet.known() == SharedBreaker("payments", 2, None)


async def test_what_was_found_out_before_the_first_look_is_told(fleet: Fleet) -> None:
    mine = fleet.breaker()
    fail(mine)

    await fleet.join(mine)
    await until(lambda: mine.news is None)

    assert await fleet.known() == SharedBreaker("payments", 1, RECOVERY)


async def test_what_fails_while_a_closing_is_told_opens_it_again(fleet: Fleet) -> None:
    mine, other = fleet.breaker(), fleet.breaker()
    await fleet.join(mine)
    await fleet.join(other)
    await fleet.opened(mine, other)
    fleet.clock.advance(RECOVERY)
    trial = await trial_of(mine)
    answer = fleet.store.silent["close_breaker"] = asyncio.Event()

    trial.end(SUCCEEDED)
    await until(lambda: fleet.store.asked["close_breaker"] == 1)
    fail(mine)
    answer.set()
    await until(lambda: other.state == "open" and not mine.news)
    await looked(fleet)

    assert (mine.state, other.state) == ("open", "open")
    assert (await fleet.known()).epoch == 3


async def test_a_process_that_stops_says_what_it_has_found_out(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing_module, "LOOK_EVERY", 1000)
    mine = fleet.breaker()
    member = await fleet.join(mine)

    fail(mine)
    await member.stop()

    assert (await fleet.known()).epoch == 1
    assert not mine.is_governed


async def test_who_comes_too_late_looks_at_once_at_what_others_found_out(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing_module, "LOOK_EVERY", 1000)
    mine = fleet.breaker()
    await fleet.join(mine)
    open_breaker = fleet.store.open_breaker

    async def be_late(name: str, *, epoch: int, recovery: timedelta) -> bool:
        await MemoryStore.open_breaker(fleet.store, name, epoch=epoch, recovery=10 * recovery)
        return await open_breaker(name, epoch=epoch, recovery=recovery)

    monkeypatch.setattr(fleet.store, "open_breaker", be_late)
    fail(mine)
    await until(lambda: mine.half_open_in == 10 * RECOVERY)

    assert mine.news is None


async def test_a_process_that_stops_does_not_wait_for_its_next_look(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing_module, "LOOK_EVERY", 1000)
    mine = fleet.breaker()
    member = await fleet.join(mine)

    async with asyncio.timeout(20):
        await member.stop()

    assert not mine.is_governed


async def test_by_a_clock_of_the_store_that_is_late_it_is_too_soon_for_trials(fleet: Fleet) -> None:
    mine = fleet.breaker()
    await fleet.join(mine)
    await fleet.opened(mine)
    ahead = Clock()
    mine._clock = lambda: ahead() + RECOVERY
    assert mine.state == "half-open"

    assert await is_refused(mine)

    assert mine.half_open_in == RECOVERY


# Trials


async def test_a_call_waits_until_the_store_has_said_who_tries(fleet: Fleet) -> None:
    mine = fleet.breaker()
    await fleet.join(mine)
    await fleet.opened(mine)
    answer = fleet.store.silent["probe_breaker"] = asyncio.Event()
    fleet.clock.advance(RECOVERY)

    trying = asyncio.create_task(mine.begin())
    await until(lambda: fleet.store.asked["probe_breaker"] > 0)
    assert not trying.done()
    answer.set()

    (await trying).end(SUCCEEDED)
    assert mine.state == "closed"


async def test_while_another_tries_calls_are_refused_and_the_store_is_asked_once_a_second(
    fleet: Fleet,
) -> None:
    mine, other = fleet.breaker(), fleet.breaker()
    await fleet.join(mine)
    await fleet.join(other)
    await fleet.opened(mine, other)
    fleet.clock.advance(RECOVERY)
    trial = await trial_of(mine)

    refusals = await asyncio.gather(*[is_refused(other) for _ in range(5)])
    refusals += [await is_refused(other) for _ in range(20)]
    await looked(fleet)

    assert all(refusals)
    assert fleet.store.probes[other.holder] == 1
    fleet.clock.advance(1)
    assert await is_refused(other)
    assert fleet.store.probes[other.holder] == 2
    trial.end(NO_VERDICT)


async def test_the_trials_of_a_process_that_was_killed_are_given_to_another(fleet: Fleet) -> None:
    mine, other = fleet.breaker(), fleet.breaker()
    member = await fleet.join(mine)
    await fleet.join(other)
    await fleet.opened(mine, other)
    fleet.clock.advance(RECOVERY)
    await trial_of(mine)
    await member.kill()
    assert await is_refused(other)

    fleet.clock.advance(TRIALS_LEASE.total_seconds())

    (await trial_of(other)).end(SUCCEEDED)


async def test_trials_that_are_not_used_are_left_to_others(fleet: Fleet) -> None:
    mine, other = fleet.breaker(), fleet.breaker()
    await fleet.join(mine)
    await fleet.join(other)
    await fleet.opened(mine, other)
    fleet.clock.advance(RECOVERY)

    (await trial_of(mine)).end(NO_VERDICT)
    await looked(fleet, 6)

    (await trial_of(other)).end(SUCCEEDED)


async def test_a_process_that_stops_leaves_its_trials_to_others(fleet: Fleet) -> None:
    mine, other = fleet.breaker(), fleet.breaker()
    member = await fleet.join(mine)
    await fleet.join(other)
    await fleet.opened(mine, other)
    fleet.clock.advance(RECOVERY)
    trial = await trial_of(mine)
    await looked(fleet)

    trial.end(NO_VERDICT)
    await member.stop()

    (await trial_of(other)).end(SUCCEEDED)


async def test_a_trial_that_never_answers_does_not_keep_others_from_trying(fleet: Fleet) -> None:
    mine, other = fleet.breaker(recovery=1), fleet.breaker(recovery=1)
    await fleet.join(mine)
    await fleet.join(other)
    await fleet.opened(mine, other)
    fleet.clock.advance(1)
    await trial_of(mine)
    assert await is_refused(other)

    fleet.clock.advance(1)
    await looked(fleet, 6)

    (await trial_of(other)).end(SUCCEEDED)


async def test_a_grant_that_comes_after_the_circuit_has_changed_is_none(fleet: Fleet) -> None:
    mine = fleet.breaker(recovery=1)
    await fleet.join(mine)
    await fleet.opened(mine)
    answer = fleet.store.silent["probe_breaker"] = asyncio.Event()
    fleet.clock.advance(1)

    trial = mine.begin_here()  # cannot wait
    await until(lambda: fleet.store.asked["probe_breaker"] > 0)
    trial.end(FAILED)
    fleet.clock.advance(1)
    assert mine.state == "half-open"
    waiting = asyncio.create_task(mine.begin())
    await asyncio.sleep(0)
    asked = fleet.store.asked["probe_breaker"]
    answer.set()
    (await waiting).end(SUCCEEDED)

    assert fleet.store.asked["probe_breaker"] > asked


# A store that does not answer


async def test_without_a_store_each_goes_by_itself(fleet: Fleet) -> None:
    mine = fleet.breaker()
    await fleet.join(mine)
    fleet.store.error = StoreUnavailable("away")
    await until(lambda: not mine.is_governed)

    fail(mine)
    fleet.clock.advance(RECOVERY)
    (await trial_of(mine)).end(SUCCEEDED)

    assert mine.state == "closed"


async def test_a_store_that_goes_away_while_a_call_waits_for_its_answer_lets_it_try(
    fleet: Fleet,
) -> None:
    mine = fleet.breaker()
    await fleet.join(mine, patience=0.05)
    await fleet.opened(mine)
    fleet.store.silent["probe_breaker"] = asyncio.Event()
    fleet.clock.advance(RECOVERY)

    (await trial_of(mine)).end(SUCCEEDED)

    assert not mine.is_governed
    assert mine.state == "closed"


async def test_a_store_that_is_away_is_asked_less_and_less_often(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures: list[int] = []

    def backoff(number: int) -> float:
        failures.append(number)
        return 0.0

    monkeypatch.setattr(sharing_module, "backoff", backoff)
    mine = fleet.breaker()
    await fleet.join(mine)
    for _ in range(2):  # an outage counts from its beginning
        failures.clear()
        fleet.store.error = StoreUnavailable("away")
        await until(lambda: len(failures) > 2)
        fleet.store.error = None
        await until(lambda: mine.is_governed)

        assert failures[:3] == [1, 2, 3]


async def test_a_process_stops_though_the_store_is_away(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sharing_module, "LOOK_EVERY", 1000)
    mine = fleet.breaker()
    member = await fleet.join(mine)
    fleet.store.error = StoreUnavailable("away")

    fail(mine)
    await member.stop()

    assert not mine.is_governed
    assert "store.unavailable doing=share breakers" in caplog.text


async def test_one_that_somebody_holds_does_not_keep_the_others_from_being_told_at_last(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sharing_module, "LOOK_EVERY", 1000)
    held, free = fleet.breaker(), fleet.breaker("mail")
    member = await fleet.join(held, free)
    fleet.store.held_names = {"payments"}

    fail(held)
    fail(free)
    await member.stop()

    known = await MemoryStore.breakers(fleet.store, ["mail", "payments"])
    assert known == [SharedBreaker("mail", 1, RECOVERY)]
    assert "breaker.held breaker=payments" in caplog.text


async def test_one_that_somebody_holds_goes_by_itself_and_the_others_do_not(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    held, free = fleet.breaker(), fleet.breaker("mail")
    await fleet.join(held, free)
    await fleet.opened(held)
    fleet.store.held_names = {"payments"}

    fleet.clock.advance(RECOVERY)
    (await trial_of(held)).end(SUCCEEDED)
    fail(free)
    await until(lambda: not free.news)

    assert held.state == "closed"
    assert not held.is_governed
    assert free.is_governed
    assert "breaker.held breaker=payments" in caplog.text
    fleet.store.held_names = set()
    await until(lambda: held.is_governed)
    assert await fleet.known() == SharedBreaker("payments", 2, None)


def test_a_call_outlives_the_event_loop_of_a_worker() -> None:
    fleet = Fleet()
    breaker = fleet.breaker()

    async def worked() -> Callable[[], None] | None:
        member = await fleet.join(breaker)
        wake = breaker._wake
        await member.stop()
        return wake

    breaker.govern(asyncio.run(worked()))
    fail(breaker)

    assert breaker.state == "open"
