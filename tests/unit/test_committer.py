"""The committer writes everything it is given, whatever one of them runs into."""

import asyncio
import contextvars
import random
from collections import Counter
from collections.abc import Sequence
from uuid import UUID

import pytest
from msgspec.structs import replace

from windlass.model.errors import StoreBusy, StoreUnavailable
from windlass.model.task import Answer, Claim, ClaimedTask, Outcome, Settlement
from windlass.runtime import committer as committer_module
from windlass.runtime.committer import LARGEST_BATCH, Committer, Done
from windlass.runtime.job import Job

TOKEN = UUID(int=1)


def done(number: int) -> Done:
    task = ClaimedTask(UUID(int=number), "t", "q", 10, "{}", 0, 4, 1, None)
    job = Job(Claim(TOKEN, 1, (task,)), task, 0.0)
    return Done(job, Settlement(TOKEN, task.id, 1, Outcome.COMPLETED, result="1"))


class FakeStore:
    """Remembers batches; refuses what it is told to refuse."""

    def __init__(self) -> None:
        self.batches: list[list[Settlement]] = []
        self.busy: set[UUID] = set()
        self.poison: set[UUID] = set()
        self.hopeless: set[UUID] = set()
        self.lost: set[UUID] = set()
        self.outages = 0
        self.most = LARGEST_BATCH  # settlements that it answers to
        self.tries = 0
        self.entered = asyncio.Event()
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def settle(self, settlements: Sequence[Settlement]) -> list[Answer]:
        self.entered.set()
        self.tries += 1
        await self.go_on.wait()
        if self.outages:
            self.outages -= 1
            raise StoreUnavailable("gone")
        if len(settlements) > self.most:
            raise StoreUnavailable("no answer")
        ids = {one.task_id for one in settlements}
        if self.busy & ids:
            raise StoreBusy("held")
        if self.hopeless & ids:
            raise ValueError("cannot be stored at all")
        if any(one.task_id in self.poison and one.result is not None for one in settlements):
            raise ValueError("cannot be stored")
        self.batches.append(list(settlements))
        return [Answer.LOST if one.task_id in self.lost else Answer.APPLIED for one in settlements]

    async def held(self, settlements: Sequence[Settlement]) -> list[bool]:
        return [one.task_id in self.busy for one in settlements]

    def written(self) -> dict[UUID, Outcome]:
        return {one.task_id: one.outcome for batch in self.batches for one in batch}


class Bench:
    def __init__(self) -> None:
        self.store = FakeStore()
        self.settled: Counter[Claim] = Counter()
        self.committer = Committer(store=self.store, settled=self.settled.update)


@pytest.fixture
def bench() -> Bench:
    return Bench()


async def test_a_whole_batch_does_not_wait_for_the_commit_under_way_but_a_third_does(
    bench: Bench,
) -> None:
    bench.store.go_on.clear()
    running = asyncio.create_task(bench.committer.run())
    bench.committer.add(done(0))
    await bench.store.entered.wait()
    asked = []
    for first, number in ((1, LARGEST_BATCH - 1), (LARGEST_BATCH, 1), (1000, LARGEST_BATCH)):
        bench.store.entered.clear()
        for each in range(first, first + number):
            bench.committer.add(done(each))
        for _ in range(5):
            await asyncio.sleep(0)
        asked.append(bench.store.entered.is_set())
    bench.store.go_on.set()
    bench.committer.close()
    await running

    assert asked == [False, True, False]
    assert sorted(map(len, bench.store.batches)) == [1, LARGEST_BATCH, LARGEST_BATCH]
    assert bench.settled.total() == 2 * LARGEST_BATCH + 1


async def test_what_is_committed_beside_is_waited_for_at_the_end(bench: Bench) -> None:
    bench.store.go_on.clear()
    running = asyncio.create_task(bench.committer.run())
    bench.committer.add(done(0))
    await bench.store.entered.wait()
    for each in range(1, LARGEST_BATCH + 1):
        bench.committer.add(done(each))
    bench.committer.close()
    await asyncio.sleep(0)
    bench.store.go_on.set()
    await running

    assert bench.settled.total() == LARGEST_BATCH + 1


async def test_what_ends_during_a_commit_is_the_next_batch(bench: Bench) -> None:
    bench.store.go_on.clear()
    running = asyncio.create_task(bench.committer.run())
    bench.committer.add(done(1))
    await bench.store.entered.wait()
    for number in range(2, 6):
        bench.committer.add(done(number))
    bench.store.go_on.set()
    bench.committer.close()
    await running

    assert [len(batch) for batch in bench.store.batches] == [1, 4]
    assert bench.settled.total() == 5


async def test_no_batch_is_larger_than_the_largest_and_none_is_left_out(bench: Bench) -> None:
    for number in range(LARGEST_BATCH + 1):
        bench.committer.add(done(number))
    bench.committer.close()
    await bench.committer.run()

    assert [len(batch) for batch in bench.store.batches] == [LARGEST_BATCH, 1]


async def test_a_batch_holds_no_more_than_its_bytes_and_one_task_at_least(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(committer_module, "BATCH_BYTES", 10)
    kinds = [("x" * 5, None), ("x" * 2, "x" * 3), (None, "x"), ("x" * 50, None), (None, None)]
    for number, (result, error) in enumerate(kinds):
        each = done(number)
        settlement = replace(each.settlement, result=result, error=error)
        bench.committer.add(Done(each.job, settlement))
    bench.committer.close()
    await bench.committer.run()

    assert [len(batch) for batch in bench.store.batches] == [2, 1, 1, 1]
    assert list(bench.store.written()) == [UUID(int=number) for number in range(len(kinds))]


async def test_a_batch_that_the_store_gives_up_on_is_written_in_halves(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be too much for the time that there is, or for one message."""
    monkeypatch.setattr(committer_module, "backoff", lambda *_, **__: 0.0)
    bench.store.most = 3
    for number in range(8):
        bench.committer.add(done(number))
    bench.committer.close()
    async with asyncio.timeout(10):
        await bench.committer.run()

    assert [len(batch) for batch in bench.store.batches] == [2, 2, 2, 2]
    assert bench.store.tries == (2 + 1 + 2) + (
        2 + 2
    )  # a half is divided at once if it fails as well
    assert bench.settled.total() == 8


async def test_one_failure_divides_no_batch(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committer_module, "backoff", lambda *_, **__: 0.0)
    bench.store.outages = 1
    for number in range(8):
        bench.committer.add(done(number))
    bench.committer.close()
    await bench.committer.run()

    assert [len(batch) for batch in bench.store.batches] == [8]


async def test_what_somebody_holds_is_tried_again_beside_the_others(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(committer_module, "HELD_AGAIN_AFTER", 0.0)
    bench.store.busy = {UUID(int=3), UUID(int=5)}
    running = asyncio.create_task(bench.committer.run())

    for turn in (1, 2):  # for as long as they are held
        numbers = range(10 * turn, 10 * turn + 8) if turn > 1 else range(1, 9)
        for number in numbers:
            bench.committer.add(done(number))
        free = {UUID(int=number) for number in numbers} - bench.store.busy
        async with asyncio.timeout(10):
            while not free <= bench.store.written().keys():
                await asyncio.sleep(0)
    bench.store.busy.clear()
    bench.committer.close()
    await running

    assert len(bench.store.written()) == 16
    assert bench.settled.total() == 16


async def test_what_somebody_holds_is_not_tried_again_at_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        bench.store.busy.clear()

    monkeypatch.setattr("windlass.runtime.committer.asyncio.sleep", sleep)
    bench.store.busy = {UUID(int=1)}
    bench.committer.add(done(1))
    bench.committer.close()
    await bench.committer.run()

    assert pauses == [committer_module.HELD_AGAIN_AFTER]


async def test_an_outage_while_what_is_held_is_looked_for_is_waited_for(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def gone(_: Sequence[Settlement]) -> list[bool]:
        bench.store.busy.clear()
        raise StoreUnavailable("gone")

    monkeypatch.setattr(bench.store, "held", gone)
    bench.store.busy = {UUID(int=1)}
    bench.committer.add(done(1))
    bench.committer.close()
    await asyncio.wait_for(bench.committer.run(), 10)

    assert bench.settled.total() == 1


async def test_a_store_that_is_silent_while_what_is_held_is_looked_for_is_asked_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent(_: Sequence[Settlement]) -> list[bool]:
        bench.store.busy.clear()
        return await asyncio.Future()

    monkeypatch.setattr(bench.store, "held", silent)
    impatient = Committer(store=bench.store, settled=bench.settled.update, patience=0.01)
    bench.store.busy = {UUID(int=1)}
    impatient.add(done(1))
    impatient.close()
    await asyncio.wait_for(impatient.run(), 10)

    assert bench.settled.total() == 1


async def test_what_is_held_is_given_up_with_the_committer(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(committer_module, "HELD_AGAIN_AFTER", 0.0)
    bench.store.busy = {UUID(int=1)}
    running = asyncio.create_task(bench.committer.run())
    bench.committer.add(done(1))
    async with asyncio.timeout(10):
        while not bench.committer._aside:
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        while bench.committer._aside:
            await asyncio.sleep(0)

    assert bench.store.written() == {}


async def test_an_outage_is_waited_for(bench: Bench) -> None:
    bench.store.outages = 3
    bench.committer.add(done(1))
    bench.committer.close()
    await bench.committer.run()

    assert bench.store.written() == {UUID(int=1): Outcome.COMPLETED}


async def test_the_longer_an_outage_the_rarer_the_tries_up_to_a_limit(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(random, "uniform", lambda _, most: most)
    bench.store.outages = 8
    bench.committer.add(done(1))
    bench.committer.close()
    await bench.committer.run()

    assert pauses == [0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0, 2.0]


async def test_an_outcome_that_cannot_be_stored_fails_its_task_alone(bench: Bench) -> None:
    bench.store.poison = {UUID(int=2)}
    for number in range(1, 5):
        bench.committer.add(done(number))
    bench.committer.close()
    await bench.committer.run()

    written = bench.store.written()
    assert written.pop(UUID(int=2)) is Outcome.FAILED
    assert set(written.values()) == {Outcome.COMPLETED}
    assert bench.settled.total() == 4


async def test_a_task_of_which_nothing_can_be_stored_is_let_go(bench: Bench) -> None:
    bench.store.hopeless = {UUID(int=2)}
    for number in range(1, 4):
        bench.committer.add(done(number))
    bench.committer.close()
    await bench.committer.run()

    assert set(bench.store.written()) == {UUID(int=1), UUID(int=3)}
    assert bench.settled.total() == 3


async def test_a_settlement_that_came_too_late_is_told_of_and_let_go(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.store.lost = {UUID(int=2)}
    for number in range(1, 4):
        bench.committer.add(done(number))
    bench.committer.close()
    await bench.committer.run()

    (said,) = caplog.messages
    assert said.startswith(f"settlement.lost task_id={UUID(int=2)} ")
    assert bench.settled.total() == 3


async def test_a_fault_beside_is_a_fault_of_the_committer(bench: Bench) -> None:
    bench.store.go_on.clear()
    running = asyncio.create_task(bench.committer.run())
    bench.committer.add(done(0))
    await bench.store.entered.wait()

    def fail(claims: Counter[Claim]) -> None:
        if claims.total() == LARGEST_BATCH:
            raise LookupError("a fault of ours")

    bench.committer._settled = fail
    for each in range(1, LARGEST_BATCH + 1):
        bench.committer.add(done(each))
    bench.store.go_on.set()

    with pytest.raises(LookupError):
        async with asyncio.timeout(10):
            await running


async def test_a_commit_beside_has_no_context_of_a_handler(bench: Bench) -> None:
    of_a_handler: contextvars.ContextVar[str] = contextvars.ContextVar("of_a_handler", default="")
    seen: list[str] = []
    bench.committer._settled = lambda _: seen.append(of_a_handler.get())
    bench.store.go_on.clear()
    running = asyncio.create_task(bench.committer.run())
    bench.committer.add(done(0))
    await bench.store.entered.wait()
    of_a_handler.set("job")
    for each in range(1, LARGEST_BATCH + 1):
        bench.committer.add(done(each))
    bench.store.go_on.set()
    bench.committer.close()
    await running

    assert seen == ["", ""]


async def test_what_is_not_written_yet_is_known_whoever_has_it_in_hand(bench: Bench) -> None:
    def last() -> set[int]:
        return {one.task_id.int for one in bench.committer.last_settlements()}

    bench.store.busy = {UUID(int=2)}
    running = asyncio.create_task(bench.committer.run())
    bench.committer.add(done(2))
    while bench.store.tries < 1 or not bench.committer._aside:
        await asyncio.sleep(0)
    assert last() == {2}  # set aside

    bench.store.go_on.clear()
    bench.store.entered.clear()
    bench.committer.add(done(0))
    await bench.store.entered.wait()
    bench.committer.add(done(1))
    assert last() == {0, 1, 2}  # under way, and waiting

    bench.store.busy.clear()
    bench.store.go_on.set()
    bench.committer.close()
    await running
    assert last() == set()
    assert len(bench.store.written()) == 3
