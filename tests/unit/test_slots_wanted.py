"""How much a worker claims: by its free slots, its buffer, its rate, and what waits to be written."""

import asyncio
from collections import Counter
from collections.abc import Sequence

import pytest

from unit.moved_clock import MovedClock
from unit.slots_bench import SIZE, Make, OneLook, claim, take
from windlass.model.task import Answer, Settlement
from windlass.runtime import slots
from windlass.service import Stop


class Pauses(Stop):
    """Notes for how long a loop would wait, and ends it."""

    def __init__(self) -> None:
        super().__init__()
        self.pauses: list[float | None] = []

    async def wait(self, seconds: float | None = None) -> bool:
        self.pauses.append(seconds)
        return True


async def test_the_buffer_holds_no_more_than_its_bytes(make: Make) -> None:
    worker = await make(buffer_bytes=100 * SIZE).worker()
    await take(worker, claim(101))  # one runs

    assert worker._slots.wanted() < 1


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


async def test_the_buffer_may_use_all_of_its_bytes(make: Make) -> None:
    worker = await make(buffer_bytes=150 * SIZE).worker()
    await take(worker, claim(101))

    assert worker._slots.wanted() == 50


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
    make: Make, clock: MovedClock
) -> None:
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
    make: Make, clock: MovedClock
) -> None:
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
    make: Make, clock: MovedClock
) -> None:
    held = (await make(buffer=1000).worker(concurrency=100))._slots
    held._rate, held._measured_at = 3200.0, clock.now
    clock.now += 2 * slots.LOOK_EVERY
    await held.watch(OneLook())

    assert held._rate == pytest.approx(800)


@pytest.mark.parametrize(("pause", "wanted"), [(2.0, 0), (0.5, 200)])
async def test_after_a_pause_nothing_is_claimed_ahead_at_the_rate_of_before(
    make: Make, clock: MovedClock, pause: float, wanted: int
) -> None:
    """A worker that was fast must not take all there is from the others."""
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


async def test_a_moment_says_nothing_about_the_rate(make: Make, clock: MovedClock) -> None:
    held = (await make(buffer=1000).worker(concurrency=100))._slots
    held._rate, held._ended, held._measured_at = 0.0, 5, clock.now
    clock.now += slots.SHORTEST_LOOK / 2
    await held.watch(OneLook())
    too_soon = held._rate
    clock.now += slots.SHORTEST_LOOK
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
