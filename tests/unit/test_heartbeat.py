"""The heartbeat keeps leases while it can, and says which it could not keep."""

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest

from unit.moved_clock import MovedClock
from windlass.model.errors import StoreUnavailable
from windlass.model.task import Pulse, PulseAnswer, WorkerInfo, WorkerOrder
from windlass.runtime import heartbeat
from windlass.runtime.heartbeat import Heartbeat, Leases
from windlass.store import clock_watch
from windlass.store.clock_watch import ClockWatch
from windlass.store.memory import MemoryStore

ME = WorkerInfo(UUID(int=1), "host", 1, "0", 1, ("t",), None)
LEASE = timedelta(seconds=1)
TRUST = 0.9  # seconds
EVERY = 0.001  # seconds, from beat to beat
A, B = UUID(int=10), UUID(int=11)


class Bench:
    """A heart with a store that can be slow, forgetful or gone."""

    def __init__(self) -> None:
        self.clock = MovedClock()
        self.store = _Store(self.clock)
        self.leases = Leases(LEASE)
        self.is_idle = False
        self.drains = False
        self.lost: list[UUID] = []
        self.ordered: list[WorkerOrder] = []
        self.weighed: list[Mapping[str, int]] = []
        self.lost_some = threading.Event()
        self.heartbeat = Heartbeat(
            store=self.store,
            worker=ME,
            leases=self.leases,
            clock=ClockWatch(lease=LEASE, heartbeat=LEASE / 3),
            lease=LEASE,
            every=timedelta(seconds=EVERY),
            is_idle=lambda: self.is_idle,
            running=lambda: 0,
            breakers=dict,
            full_queues=tuple,
            drains=lambda: self.drains,
            lost=self._lost,
            ordered=self.ordered.append,
            weighed=self.weighed.append,
            watch_loop=_watch_nothing,
        )

    def _lost(self, tokens: list[UUID]) -> None:
        self.lost += tokens
        for token in tokens:
            self.leases.drop(token)
        self.lost_some.set()

    async def beat(self) -> None:
        await self.heartbeat._beat(self.store)


async def _watch_nothing() -> None: ...


class _Store(MemoryStore):
    def __init__(self, clock: MovedClock) -> None:
        super().__init__()
        self.clock = clock
        self.takes_once = 0.0  # seconds
        self.error: Exception | None = None
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.forgets: set[UUID] = set()
        self.skips: Counter[UUID] = Counter()  # how often yet
        self.pulses: list[tuple[frozenset[UUID], timedelta]] = []
        self.settled_meanwhile: Leases | None = None
        self.pulsed = threading.Event()
        self.answered = threading.Event()

    async def pulse(self, pulse: Pulse) -> PulseAnswer:
        self.clock.now += self.takes_once
        self.takes_once = 0.0
        self.pulsed.set()
        while not self.goes_on.is_set():
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)
        if self.error is not None:
            raise self.error
        if self.settled_meanwhile is not None:
            for token in self.forgets:
                self.settled_meanwhile.drop(token)
        self.answered.set()
        known = (await super().pulse(pulse)).registered
        self.pulses.append((frozenset(pulse.tokens), pulse.patience))
        skipped = frozenset(token for token in pulse.tokens if self.skips[token] > 0)
        self.skips.subtract(skipped)
        return PulseAnswer(frozenset(pulse.tokens) - self.forgets - skipped, known, skipped)


@pytest.fixture
async def bench(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    bench = Bench()
    monkeypatch.setattr(heartbeat, "time", bench.clock)
    await bench.store.register(ME, lease=LEASE)
    yield bench
    bench.store.goes_on.set()
    if bench.heartbeat._thread.is_alive():
        await bench.heartbeat.stop()


async def until(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, 10)


def test_a_claim_is_trusted_for_nine_tenths_of_its_lease() -> None:
    leases = Leases(LEASE)
    leases.add(A, asked_at=5.0)

    assert leases.expired(5.0 + TRUST - 0.01) == []
    assert leases.expired(5.0 + TRUST) == [A]


async def test_a_kept_lease_is_counted_from_asking_and_not_from_the_answer(bench: Bench) -> None:
    asked_at = bench.clock.now
    bench.leases.add(A, asked_at - 0.5)
    bench.store.takes_once = 0.2
    await bench.beat()

    assert bench.leases.expired(asked_at + TRUST - 0.01) == []
    assert bench.leases.expired(asked_at + TRUST) == [A]


async def test_a_claim_that_the_store_did_not_keep_is_lost_and_the_others_are_not(
    bench: Bench,
) -> None:
    bench.leases.add(A, bench.clock.now)
    bench.leases.add(B, bench.clock.now)
    bench.store.forgets = {A}
    await bench.beat()

    assert bench.lost == [A]
    assert bench.leases.tokens() == [B]


async def test_a_claim_that_was_settled_during_the_pulse_is_not_lost(bench: Bench) -> None:
    bench.leases.add(A, bench.clock.now)
    bench.store.forgets = {A}
    bench.store.settled_meanwhile = bench.leases
    await bench.beat()

    assert bench.lost == []


async def test_a_claim_that_somebody_holds_is_asked_for_again_and_is_not_lost(bench: Bench) -> None:
    asked_at = bench.clock.now
    bench.leases.add(A, asked_at - 0.5)
    bench.leases.add(B, asked_at - 0.5)
    bench.store.skips.update({A: 3, B: 1})
    await bench.beat()

    first, *patient = bench.store.pulses
    assert first == (frozenset({A, B}), timedelta(0))
    assert Counter(patient) == {(frozenset({A}), LEASE / 6): 3, (frozenset({B}), LEASE / 6): 1}
    assert bench.lost == []
    assert bench.leases.expired(asked_at + TRUST - 0.01) == []


async def test_a_skipped_claim_does_not_keep_the_next_beat_of_the_others(bench: Bench) -> None:
    asked_at = bench.clock.now
    bench.leases.add(A, asked_at - 0.5)
    bench.leases.add(B, asked_at - 0.5)
    bench.store.skips.update({A: 3})
    bench.store.takes_once = 0.1  # longer than the time between two beats
    await bench.beat()

    assert bench.store.pulses == [(frozenset({A, B}), timedelta(0))]
    # Nobody has extended it: it is not to be trusted for longer than before.
    assert bench.leases.expired(asked_at + TRUST - 0.01) == [A]


async def test_a_claim_let_go_while_somebody_held_it_is_not_asked_for_again(bench: Bench) -> None:
    bench.leases.add(A, bench.clock.now)
    bench.store.skips.update({A: 3})
    bench.store.forgets = {A}
    bench.store.settled_meanwhile = bench.leases
    await bench.beat()

    assert len(bench.store.pulses) == 1


async def test_a_pulse_that_hangs_is_given_up(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang(_: Pulse) -> PulseAnswer:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(bench.store, "pulse", hang)
    beating = asyncio.create_task(bench.beat())
    await asyncio.wait([beating], timeout=30)

    assert isinstance(beating.exception(), StoreUnavailable)


@pytest.mark.parametrize("method", ["register", "now"])
async def test_nothing_that_a_beat_asks_beside_the_pulse_can_stop_the_heart(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    async def hang(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    await bench.store.deregister(ME.id)
    monkeypatch.setattr(bench.store, method, hang)
    beating = asyncio.create_task(bench.beat())
    await asyncio.wait([beating], timeout=30)

    assert isinstance(beating.exception(), StoreUnavailable)


async def test_what_is_not_trusted_any_more_is_not_asked_for(bench: Bench) -> None:
    """The store would believe it: it may keep a claim whose worker says that it holds."""
    bench.leases.add(A, bench.clock.now - TRUST)
    bench.leases.add(B, bench.clock.now)
    await bench.beat()

    assert bench.store.pulses == [(frozenset({B}), timedelta(0))]
    assert bench.leases.expired(bench.clock.now) == [A]


async def test_a_claim_that_is_not_held_any_more_is_not_trusted_again(bench: Bench) -> None:
    bench.leases.extend(frozenset({A}), bench.clock.now)

    assert not bench.leases.holds(A)


async def test_a_worker_that_goes_idle_during_the_pulse_stays_so(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulse = bench.store.pulse

    async def pulse_late(asked: Pulse) -> PulseAnswer:
        bench.is_idle = True
        await bench.store.set_idle(ME.id, True)
        return await pulse(asked)

    monkeypatch.setattr(bench.store, "pulse", pulse_late)
    await bench.beat()

    assert (await bench.store.workers())[0].idle


async def test_a_worker_that_was_removed_registers_again(bench: Bench) -> None:
    await bench.store.deregister(ME.id)
    await bench.beat()

    assert [worker.id for worker in await bench.store.workers()] == [str(ME.id)]


async def test_what_a_pulse_kept_is_trusted_though_the_worker_cannot_register_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def gone(*_: object, **__: object) -> None:
        raise StoreUnavailable("gone")

    asked_at = bench.clock.now
    bench.leases.add(A, asked_at - 0.5)
    bench.leases.add(B, asked_at - 0.5)
    bench.store.forgets = {B}
    await bench.store.deregister(ME.id)
    monkeypatch.setattr(bench.store, "register", gone)
    with pytest.raises(StoreUnavailable):
        await bench.beat()

    assert bench.lost == [B]
    assert bench.leases.expired(asked_at + TRUST - 0.01) == []


async def test_a_lease_that_could_not_be_kept_in_time_is_lost(bench: Bench) -> None:
    bench.leases.add(A, bench.clock.now)
    bench.leases.add(B, bench.clock.now + 0.5)
    bench.store.error = StoreUnavailable("gone")
    bench.store.takes_once = TRUST
    await bench.heartbeat.start()
    await until(bench.lost_some)

    assert bench.lost == [A]


async def test_a_lease_runs_out_also_while_the_store_does_not_answer(bench: Bench) -> None:
    bench.leases.add(A, bench.clock.now)
    bench.store.takes_once = TRUST
    bench.store.goes_on.clear()  # and is not given up either, as a dead connection may not be
    await bench.heartbeat.start()
    await until(bench.lost_some)

    assert bench.lost == [A]


@pytest.mark.parametrize("error", [StoreUnavailable("gone"), ValueError("unforeseen")])
async def test_the_heart_beats_on_whatever_the_store_raised(bench: Bench, error: Exception) -> None:
    bench.store.error = error
    await bench.heartbeat.start()
    await until(bench.store.pulsed)
    bench.store.error = None
    await until(bench.store.answered)

    assert bench.lost == []


async def test_the_first_beat_comes_before_anything_else_is_asked_of_the_server(
    bench: Bench,
) -> None:
    """Its connection is there from the start: later the server may have none to spare."""
    bench.heartbeat._every = 3600
    bench.heartbeat._answer_within = 30
    bench.store.goes_on.clear()
    starting = asyncio.create_task(bench.heartbeat.start())
    await until(bench.store.pulsed)
    assert not starting.done()
    bench.store.goes_on.set()
    await starting

    assert bench.store.answered.is_set()


async def test_each_beat_looks_at_the_stores_clock(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that whoever becomes the leader knows how it went before."""
    looks: list[object] = []

    async def look(store: object) -> bool:
        looks.append(store)
        return True

    monkeypatch.setattr(bench.heartbeat._clock, "look", look)
    await bench.beat()

    assert looks == [bench.store]


async def test_a_beat_leaves_the_clock_to_a_leader_that_looks_at_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock_watch, "time", bench.clock)
    looks: list[float] = []

    async def now() -> datetime:
        looks.append(bench.clock.now)
        return datetime(2027, 3, 3, tzinfo=UTC)

    monkeypatch.setattr(bench.store, "now", now)
    began = bench.clock.now
    await bench.heartbeat._clock.look(bench.store)  # as the leader does
    for _ in range(2):
        bench.clock.now += EVERY / 2
        await bench.beat()

    assert looks == pytest.approx([began, began + EVERY], abs=EVERY / 10)


async def test_what_is_asked_of_the_worker_is_told_at_every_beat_if_it_is_known(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders = [WorkerOrder.RESUME, None, WorkerOrder.PAUSE]

    async def pulse(_: Pulse) -> PulseAnswer:
        return PulseAnswer(frozenset(), registered=True, order=orders.pop(0))

    monkeypatch.setattr(bench.store, "pulse", pulse)
    for _ in range(3):
        await bench.beat()

    assert bench.ordered == [WorkerOrder.RESUME, WorkerOrder.PAUSE]


async def test_what_queues_weigh_is_told_at_every_beat_that_says_so(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights: list[Mapping[str, int] | None] = [{"mail": 3}, None, {}]

    async def pulse(_: Pulse) -> PulseAnswer:
        return PulseAnswer(frozenset(), registered=True, weights=weights.pop(0))

    monkeypatch.setattr(bench.store, "pulse", pulse)
    for _ in range(3):
        await bench.beat()

    assert bench.weighed == [{"mail": 3}, {}]


async def test_a_heart_that_is_hurried_beats_before_its_time(bench: Bench) -> None:
    await bench.store.register(ME, lease=LEASE)
    bench.heartbeat._every = 1000.0
    told = threading.Event()
    await bench.heartbeat.start()
    bench.heartbeat._ordered = lambda _: told.set()
    try:
        bench.heartbeat.beat_now()

        assert await asyncio.to_thread(told.wait, 10)
    finally:
        await bench.heartbeat.stop()


async def test_each_beat_says_whether_the_worker_drains(bench: Bench) -> None:
    await bench.beat()
    before = (await bench.store.workers())[0].drained_at
    bench.drains = True

    await bench.beat()

    assert before is None
    assert (await bench.store.workers())[0].drained_at is not None
