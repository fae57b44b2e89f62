"""The worker's slots and buffer: what they take, keep and give back, without a store that works."""

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any
from uuid import UUID

import pytest

from unit.moved_clock import MovedClock
from windlass import App
from windlass.model.attempt import Released
from windlass.model.errors import StoreUnavailable
from windlass.model.task import Answer, Claim, ClaimedTask, Outcome, Settlement, Started
from windlass.runtime import carrier, slots
from windlass.runtime.job import Job
from windlass.runtime.worker import Worker
from windlass.service import Stop
from windlass.telemetry import counted, unwatch, watch

SIZE = 1000  # bytes of a payload
TOKEN = UUID(int=1)


class Bench:
    """An app whose one task runs until it is let go, and a worker that has one slot for it if not more."""

    def __init__(self, **settings: Any) -> None:
        self.app = App("memory:", **settings)
        self.let_go = asyncio.Event()
        self.workers: list[Worker] = []
        self.result: str | None = None

        @self.app.task
        async def work(text: str) -> str | None:
            await self.let_go.wait()
            return self.result

    async def worker(self, concurrency: int = 1) -> Worker:
        worker = await self.app.new_worker(concurrency=concurrency)
        # As if tasks had been short until now, so that as many as possible are kept ready.
        worker._slots._rate, worker._slots._empty_since = 1e6, math.inf
        self.workers.append(worker)
        return worker

    async def close(self) -> None:
        self.let_go.set()
        for worker in self.workers:
            worker.stop()
            await worker._slots.until_nothing_runs()
        await self.app.close()


Make = Callable[..., Bench]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    made: list[Bench] = []

    def make(**settings: Any) -> Bench:
        made.append(Bench(**settings))
        return made[-1]

    yield make
    for bench in made:
        await bench.close()


@pytest.fixture
def told_lost() -> Iterator[list[UUID]]:
    """The tasks of which it was told that they are lost, as often as it was."""
    told: list[UUID] = []

    def look(event: str, batch: Any) -> None:
        if event == "lost":
            told.extend(task.id for task in batch)

    watch(look)
    yield told
    unwatch(look)


def claim(tasks: int, *, alone: bool = False) -> Claim:
    text = "x" * (SIZE - len('{"text":""}'))
    payload = f'{{"text":"{text}"}}'
    return Claim(
        TOKEN,
        1,
        tuple(
            ClaimedTask(UUID(int=n), "work", "default", 10, payload, 0, 4, 1, None)
            for n in range(tasks)
        ),
        alone,
    )


async def take(worker: Worker, held: Claim) -> None:
    worker._slots.hold(held, time.monotonic())
    await worker._slots.take(held)


class OneLook(Stop):
    """Lets a loop pass once."""

    _passes = 1

    async def wait(self, seconds: float | None = None) -> bool:
        self._passes -= 1
        return self._passes < 0


class Pauses(Stop):
    """Notes for how long a loop would wait, and ends it."""

    def __init__(self) -> None:
        super().__init__()
        self.pauses: list[float | None] = []

    async def wait(self, seconds: float | None = None) -> bool:
        self.pauses.append(seconds)
        return True


def waiting_to_be_written(worker: Worker) -> list[Outcome]:
    return [done.settlement.outcome for done in worker._committer._waiting]


async def test_the_buffer_holds_no_more_than_its_bytes(make: Make) -> None:
    worker = await make(buffer_bytes=100 * SIZE).worker()
    await take(worker, claim(101))  # one runs

    assert worker._slots.wanted() < 1


async def test_what_waits_for_too_long_is_given_back_unrun_and_not_sooner(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = MovedClock()
    monkeypatch.setattr(slots, "time", clock)
    monkeypatch.setattr(carrier, "time", clock)
    worker = await make(buffer_seconds=60, lease=600).worker()
    await take(worker, claim(3))

    clock.now += 59
    await worker._slots.watch(OneLook())
    assert waiting_to_be_written(worker) == []

    clock.now += 2
    await worker._slots.watch(OneLook())
    assert waiting_to_be_written(worker) == [Outcome.RELEASED] * 2
    assert worker._slots._waiting_bytes == 0


async def test_nothing_is_claimed_while_too_many_ended_tasks_cannot_be_written(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make()
    bench.let_go.set()
    store = await bench.app.store()
    written = asyncio.Event()
    settle = store.settle

    async def settle_later(settlements: Sequence[Settlement]) -> list[Answer]:
        await written.wait()
        return await settle(settlements)

    monkeypatch.setattr(store, "settle", settle_later)
    monkeypatch.setattr(slots, "MOST_UNSETTLED", 5)
    handles = [await bench.app.enqueue("work", {"text": str(n)}) for n in range(20)]
    worker = await bench.app.new_worker(concurrency=2)
    running = asyncio.create_task(worker.run())
    async with asyncio.timeout(10):
        while worker._slots.unsettled <= 5:
            await worker._slots._change()
    unwritten = worker._slots.wanted()
    written.set()
    for handle in handles:
        await handle.result(10)
    worker.stop()
    await running

    assert unwritten == 0


async def test_a_suspect_whose_start_cannot_be_written_is_not_run_and_not_kept(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make()
    worker = await bench.worker()

    async def start(_: Sequence[Started]) -> frozenset[UUID]:
        raise StoreUnavailable("gone")

    monkeypatch.setattr(await bench.app.store(), "start", start)
    with pytest.raises(StoreUnavailable):
        await take(worker, claim(1, alone=True))

    assert worker._slots.busy() == 0
    assert not worker._leases.holds(TOKEN)


async def test_a_claim_that_was_lost_before_it_was_taken_is_not_run(make: Make) -> None:
    worker = await make().worker()
    held = claim(2)
    worker._slots.hold(held, time.monotonic())
    worker._slots.claims_lost([TOKEN])
    await worker._slots.take(held)

    assert worker._slots.busy() == 0


async def test_what_was_lost_before_it_was_taken_is_told_to_whoever_measures(
    make: Make, told_lost: list[UUID]
) -> None:
    worker = await make().worker()
    held = claim(2)
    worker._slots.hold(held, time.monotonic())
    worker._slots.claims_lost([TOKEN])
    await worker._slots.take(held)

    assert told_lost == [task.id for task in held.tasks]


async def test_a_job_that_is_lost_twice_is_told_once(make: Make, told_lost: list[UUID]) -> None:
    worker = await make().worker()
    held = claim(2)
    await take(worker, held)
    jobs = [*worker._slots._running, *worker._slots._waiting]
    before = counted("lease.lost")

    worker._slots.claims_lost([TOKEN])
    for job in jobs:
        worker._slots.job_lost(job)  # as a report says that was under way
    await worker._slots.until_nothing_runs()

    assert told_lost == [task.id for task in held.tasks]
    assert counted("lease.lost") - before == 2


async def test_a_suspect_has_not_begun_when_its_start_is_written(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make()
    worker = await bench.worker()
    held_meanwhile: list[int] = []

    async def start(_: Sequence[Started]) -> frozenset[UUID]:
        held_meanwhile.append(worker._slots.busy())
        return frozenset()

    monkeypatch.setattr(await bench.app.store(), "start", start)
    await take(worker, claim(1, alone=True))

    assert held_meanwhile == [0]
    assert worker._slots.busy() == 1


async def test_the_buffer_may_use_all_of_its_bytes(make: Make) -> None:
    worker = await make(buffer_bytes=150 * SIZE).worker()
    await take(worker, claim(101))

    assert worker._slots.wanted() == 50


async def test_a_suspect_that_is_lost_while_its_start_is_written_is_not_run(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make()
    worker = await bench.worker()

    async def start(_: Sequence[Started]) -> frozenset[UUID]:
        worker._slots.claims_lost(
            [TOKEN]
        )  # it took longer than the lease; nobody has rescued it yet
        return frozenset()

    monkeypatch.setattr(await bench.app.store(), "start", start)
    await take(worker, claim(1, alone=True))

    assert worker._slots.busy() == 0


async def test_a_handler_that_ends_after_its_task_went_back_writes_nothing_more(
    make: Make,
) -> None:
    bench = make()
    worker = await bench.worker()
    await take(worker, claim(1))
    (job,) = worker._slots._running
    worker._slots._running.discard(job)  # as at the end of a shutdown
    worker._slots._end(job, Released())
    bench.let_go.set()
    assert job.runner is not None
    await job.runner

    assert waiting_to_be_written(worker) == [Outcome.RELEASED]


async def test_a_lease_is_kept_until_the_last_task_of_its_claim_is_written(make: Make) -> None:
    worker = await make().worker()
    held = claim(2)
    await take(worker, held)
    first, second = [*worker._slots._running, *worker._slots._waiting]
    committer = worker._committer
    worker._slots._end(first, Released())
    worker._slots.settled(Counter([committer._waiting[-1].job.claim]))
    kept = worker._leases.holds(TOKEN)
    worker._slots._end(second, Released())
    worker._slots.settled(Counter([committer._waiting[-1].job.claim]))

    assert kept
    assert not worker._leases.holds(TOKEN)


async def test_the_heart_is_told_whether_the_worker_is_idle(make: Make) -> None:
    bench = make()
    worker = await bench.worker()
    store = await bench.app.store()
    await store.register(worker._options.info, lease=worker._lease)
    told = []
    for idle in (True, False):
        worker._fetcher._idle = idle
        await worker._heartbeat()._beat(store)
        told.append((await store.workers())[0].idle)

    assert told == [True, False]


async def test_a_fault_of_the_executor_fails_the_task_and_costs_no_slot(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(_job: Job) -> None:
        raise RuntimeError("a fault of ours")

    worker = await make().worker()
    monkeypatch.setattr(worker._executor, "run", broken)

    await take(worker, claim(2))
    async with asyncio.timeout(10):
        while worker._slots.unsettled < 2:
            await worker._slots._change()

    assert waiting_to_be_written(worker) == [Outcome.RETRIED] * 2


async def test_a_lease_is_trusted_from_the_moment_it_was_asked_for(make: Make) -> None:
    worker = await make(lease=30).worker()
    asked_at = time.monotonic() - 20

    worker._slots.hold(claim(1), asked_at)

    assert worker._leases.expired(asked_at + 26) == []
    assert worker._leases.expired(asked_at + 28) == [TOKEN]


async def test_the_heart_is_told_how_many_run(make: Make) -> None:
    bench = make()
    worker = await bench.worker()
    store = await bench.app.store()
    await store.register(worker._options.info, lease=worker._lease)
    told = []
    await take(worker, claim(2))
    for _ in range(2):
        await worker._heartbeat()._pulse(store, [])
        told.append((await store.workers())[0].running)
        bench.let_go.set()
        await worker._slots.until_nothing_runs()

    assert told == [1, 0]


async def test_a_handler_is_given_up_so_long_after_it_could_hear_that_it_should_end(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = MovedClock()
    monkeypatch.setattr(slots, "time", clock)
    monkeypatch.setattr(carrier, "time", clock)
    worker = await make(lease=600).worker()
    await take(worker, claim(1))
    (job,) = worker._slots._running
    job.give_way_at = clock.now
    written = []
    for passes in (60, slots.GIVE_WAY_WITHIN - 1, 2):  # first, the event loop was blocked
        clock.now += passes
        await worker._slots.watch(OneLook())
        written.append(waiting_to_be_written(worker))

    assert written == [[], [], [Outcome.RETRIED]]


async def test_a_job_that_has_ended_is_not_said_to_be_lost(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    bench = make()
    worker = await bench.worker()
    await take(worker, claim(1))
    (job,) = worker._slots._running
    bench.let_go.set()
    await worker._slots.until_nothing_runs()

    worker._slots.job_lost(job)  # as a report that was overtaken says

    assert caplog.messages == []


async def test_what_ends_after_its_lease_ran_out_is_not_written(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = MovedClock()
    monkeypatch.setattr(slots, "time", clock)
    monkeypatch.setattr(carrier, "time", clock)
    bench = make(lease=30)
    worker = await bench.worker()
    held = claim(1)
    worker._slots.hold(held, clock.now)
    await worker._slots.take(held)
    clock.now += 27.1  # the heart has not noticed
    bench.let_go.set()
    await worker._slots.until_nothing_runs()

    assert waiting_to_be_written(worker) == []
    assert worker._slots.busy() == 0


async def test_nothing_is_begun_under_a_lease_that_has_run_out(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = MovedClock()
    monkeypatch.setattr(slots, "time", clock)
    monkeypatch.setattr(carrier, "time", clock)
    worker = await make(lease=30).worker()
    held = claim(3)
    worker._slots.hold(held, clock.now)
    clock.now += 27.1  # the worker was stopped in its tracks, and the heart with it
    await worker._slots.take(held)

    assert worker._slots.busy() == 0
    assert worker._leases.tokens() == []


@pytest.mark.parametrize("concurrency", [1, 100])
@pytest.mark.parametrize(("done", "is_time"), [(0, False), (49, False), (50, True)])
async def test_while_tasks_wait_it_is_time_to_claim_when_as_many_more_would_fit(
    make: Make, concurrency: int, done: int, is_time: bool
) -> None:
    worker = await make(buffer=99).worker(concurrency)
    await take(worker, claim(concurrency + 99))
    for _ in range(done):
        worker._slots._next_waiting()

    assert worker._slots.has_room() is is_time


async def test_when_nothing_waits_it_is_time_to_claim_for_a_single_slot(make: Make) -> None:
    worker = await make(buffer=0).worker()
    at_first = worker._slots.has_room()
    await take(worker, claim(1))
    when_full = worker._slots.has_room()

    assert (at_first, when_full) == (True, False)


async def test_what_has_ended_since_the_last_look_counts_at_once(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = MovedClock()
    monkeypatch.setattr(slots, "time", clock)
    monkeypatch.setattr(carrier, "time", clock)
    bench = make(buffer=1000)
    worker = await bench.worker(concurrency=100)
    worker._slots._rate = 0.0  # nothing has ended so far
    await take(worker, claim(100))
    clock.now = worker._slots._measured_at + 0.1
    bench.let_go.set()
    await worker._slots.until_nothing_runs()
    a_tenth_later = worker._slots.wanted()
    clock.now = worker._slots._measured_at + 0.001  # too short to say anything
    at_once = worker._slots.wanted()

    assert a_tenth_later == pytest.approx(100 + 1000 * slots.BUFFER_AHEAD, abs=1)
    assert at_once == pytest.approx(100 + 2000 * slots.BUFFER_AHEAD, abs=1)


async def test_the_time_without_work_says_nothing_about_the_rate(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = MovedClock()
    monkeypatch.setattr(slots, "time", clock)
    monkeypatch.setattr(carrier, "time", clock)
    bench = make(buffer=1000)
    worker = await bench.worker(concurrency=100)
    worker._slots._rate, worker._slots._empty_since = 0.0, clock.now
    clock.now += slots.LOOK_EVERY_IDLE * 0.9  # and nobody has looked meanwhile
    await take(worker, claim(100))
    clock.now += 0.1
    bench.let_go.set()
    await worker._slots.until_nothing_runs()

    assert worker._slots.wanted() == pytest.approx(100 + 1000 * slots.BUFFER_AHEAD, abs=1)


async def test_it_is_looked_seldom_while_nothing_is_held(make: Make) -> None:
    bench = make()
    worker = await bench.worker(concurrency=1)
    looks = Pauses()
    await worker._slots.watch(looks)
    await take(worker, claim(1))
    await worker._slots.watch(looks)

    assert looks.pauses == [slots.LOOK_EVERY_IDLE, slots.LOOK_EVERY]


async def test_a_rate_is_forgotten_with_the_time_and_not_with_the_looks(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = MovedClock()
    monkeypatch.setattr(slots, "time", clock)
    held = (await make(buffer=1000).worker(concurrency=100))._slots
    held._rate, held._measured_at = 3200.0, clock.now
    clock.now += 2 * slots.LOOK_EVERY
    await held.watch(OneLook())

    assert held._rate == pytest.approx(800)


@pytest.mark.parametrize(("pause", "wanted"), [(2.0, 0), (0.5, 200)])
async def test_after_a_pause_nothing_is_claimed_ahead_at_the_rate_of_before(
    make: Make, monkeypatch: pytest.MonkeyPatch, pause: float, wanted: int
) -> None:
    """A worker that was fast must not take all there is from the others."""
    clock = MovedClock()
    monkeypatch.setattr(slots, "time", clock)
    monkeypatch.setattr(carrier, "time", clock)
    bench = make(buffer=1000)
    worker = await bench.worker(concurrency=1)
    held = worker._slots
    bench.let_go.set()
    await take(worker, claim(1))
    await held.until_nothing_runs()
    held.settled(
        Counter({job.claim: 1 for job in [done.job for done in worker._committer._waiting]})
    )
    held._rate, held._measured_at, held._ended = 1000.0, clock.now, 0
    clock.now += slots.SHORTEST_LOOK * pause
    bench.let_go.clear()
    before = held.wanted()
    await take(worker, claim(1))

    assert (before, held.wanted()) == (1 + wanted, wanted)


async def test_a_moment_says_nothing_about_the_rate(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = MovedClock()
    monkeypatch.setattr(slots, "time", clock)
    held = (await make(buffer=1000).worker(concurrency=100))._slots
    held._rate, held._ended, held._measured_at = 0.0, 5, clock.now
    clock.now += slots.SHORTEST_LOOK / 2
    await held.watch(OneLook())
    too_soon = held._rate
    clock.now += slots.SHORTEST_LOOK / 2
    await held.watch(OneLook())

    assert (too_soon, held._ended) == (0.0, 0)
    assert held._rate > 0


async def test_nothing_is_claimed_while_results_that_cannot_be_written_fill_the_memory(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make()
    bench.let_go.set()
    bench.result = "x" * 1000
    worker = await bench.worker(concurrency=10)
    await take(worker, claim(10))
    await worker._slots.until_nothing_runs()
    wanted = [worker._slots.wanted()]
    monkeypatch.setattr(slots, "MOST_UNSETTLED_BYTES", 3000)
    wanted.append(worker._slots.wanted())

    assert wanted[0] > 0
    assert wanted[1] == 0


async def test_a_claim_is_small_until_it_is_known_how_large_tasks_are(make: Make) -> None:
    worker = await make().worker()
    at_first = worker._slots.at_once()
    await take(worker, claim(100))
    then = worker._slots.at_once()

    assert at_first == slots.FIRST_CLAIM
    assert then == pytest.approx(slots.CLAIM_BYTES / SIZE, rel=0.02)


async def test_of_huge_tasks_one_is_claimed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "CLAIM_BYTES", SIZE // 2)
    worker = await make().worker()
    await take(worker, claim(100))

    assert worker._slots.at_once() == 1


async def test_the_payload_of_a_task_that_runs_is_not_kept(make: Make) -> None:
    worker = await make().worker()
    held = claim(2)
    await take(worker, held)
    await asyncio.sleep(0)

    assert [len(task.payload) for task in held.tasks] == [0, SIZE]
