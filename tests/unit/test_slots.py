"""The worker's slots and buffer: what they take, keep and give back, without a store that works."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any
from uuid import UUID

import pytest

from unit.moved_clock import MovedClock
from unit.slots_bench import SIZE, TOKEN, Make, OneLook, claim, take
from windlass.model.attempt import Released
from windlass.model.errors import StoreUnavailable
from windlass.model.task import Outcome, Started
from windlass.runtime.job import GIVE_WAY_WITHIN, Job
from windlass.runtime.worker import Worker
from windlass.telemetry import counted, unwatch, watch


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


def waiting_to_be_written(worker: Worker) -> list[Outcome]:
    return [done.settlement.outcome for done in worker._committer._waiting]


async def test_what_waits_for_too_long_is_given_back_unrun_and_not_sooner(
    make: Make, clock: MovedClock
) -> None:
    worker = await make(buffer_seconds=60, lease=600).worker()
    await take(worker, claim(3))

    clock.now += 59
    await worker._slots.watch(OneLook())
    assert waiting_to_be_written(worker) == []

    clock.now += 2
    await worker._slots.watch(OneLook())
    assert waiting_to_be_written(worker) == [Outcome.RELEASED] * 2
    assert worker._slots._waiting_bytes == 0


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


async def test_of_many_suspects_no_start_is_written(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make()
    worker = await bench.worker()
    written: list[Started] = []

    async def start(started: Sequence[Started]) -> frozenset[UUID]:
        written.extend(started)
        return frozenset()

    monkeypatch.setattr(await bench.app.store(), "start", start)
    await take(worker, claim(3, alone=True))

    assert not written  # or one of them that takes the worker down would cost each an attempt
    assert worker._slots.busy() == 3


async def test_of_everything_that_is_held_something_is_written_when_the_process_is_given_up(
    make: Make,
) -> None:
    worker = await make().worker(concurrency=2)
    await take(worker, claim(5))
    blocking, other = sorted(worker._slots.running(), key=lambda job: job.task.id)

    last = worker._slots.last_settlements(blocking)

    assert len(last) == len({one.task_id for one in last}) == 5
    outcomes = {one.task_id: one.outcome for one in last}
    assert outcomes[blocking.task.id] is Outcome.RETRIED  # an attempt that failed
    assert outcomes[other.task.id] is Outcome.RELEASED
    assert Counter(outcomes.values()) == {Outcome.RETRIED: 1, Outcome.RELEASED: 4}


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
    make: Make, clock: MovedClock
) -> None:
    worker = await make(lease=600).worker()
    await take(worker, claim(1))
    (job,) = worker._slots._running
    job.give_way_at = clock.now
    written = []
    for passes in (60, GIVE_WAY_WITHIN - 1, 2):  # first, the event loop was blocked
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
    make: Make, clock: MovedClock
) -> None:
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
    make: Make, clock: MovedClock
) -> None:
    worker = await make(lease=30).worker()
    held = claim(3)
    worker._slots.hold(held, clock.now)
    clock.now += 27.1  # the worker was stopped in its tracks, and the heart with it
    await worker._slots.take(held)

    assert worker._slots.busy() == 0
    assert worker._leases.tokens() == []


async def test_the_payload_of_a_task_that_runs_is_not_kept(make: Make) -> None:
    worker = await make().worker()
    held = claim(2)
    await take(worker, held)
    await asyncio.sleep(0)

    assert [len(task.payload) for task in held.tasks] == [0, SIZE]
