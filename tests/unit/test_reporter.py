"""What runs for a while is reported once; whoever lost it or has to stop it is told."""

import asyncio
from collections.abc import Sequence
from uuid import UUID

import pytest

from windlass.model.errors import StoreBusy, StoreUnavailable
from windlass.model.task import Claim, ClaimedTask, Started
from windlass.runtime import reporter
from windlass.runtime.job import Halt, Job
from windlass.runtime.reporter import Reporter
from windlass.service import Stop
from windlass.store.memory import MemoryStore

TOKEN, HELD = UUID(int=100), UUID(int=101)


def job(number: int, token: UUID = TOKEN) -> Job:
    task = ClaimedTask(UUID(int=number), "t", "q", 10, "{}", 0, 4, 1, None)
    return Job(Claim(token, 1, (task,)), task, 5.0, started_at=7.0)


class Bench(MemoryStore):
    """A store that remembers what it was told, and the reporter on it."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[Started] = []
        self.was_marked: list[bool] = []
        self.gone: set[UUID] = set()
        self.cancelled: dict[UUID, str] = {}
        self.outages = 0
        self.busy_tokens: set[UUID] = set()
        self.running: list[Job] = []
        self.lost: list[Job] = []
        self.besides = 0
        self.stop = Stop()
        self.reporter = Reporter(
            store=self,
            long_running=lambda: self.running,
            lost=self.lost.append,
            beside=self.beside_it,
        )

    async def start(self, started: Sequence[Started]) -> frozenset[UUID]:
        self.was_marked += [one.reported for one in self.running]
        if self.outages:
            self.outages -= 1
            raise StoreUnavailable("gone")
        if self.busy_tokens & {one.token for one in started}:
            raise StoreBusy("somebody holds it")
        self.started += started
        return frozenset(self.gone)

    async def requested_cancellations(self, task_ids: Sequence[UUID]) -> dict[UUID, str]:
        return {key: self.cancelled[key] for key in task_ids if key in self.cancelled}

    async def beside_it(self) -> None:
        self.besides += 1
        self.stop.set()

    async def turn(self) -> None:
        self.stop = Stop()
        await asyncio.wait_for(self.reporter.run(self.stop), 10)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporter, "REPORT_EVERY", 0.001)


async def test_a_job_is_reported_once_and_marked_before_it_is_written() -> None:
    bench = Bench()
    bench.running = [job(1)]
    await bench.turn()
    bench.running.append(job(2))
    await bench.turn()

    assert [started.task_id.int for started in bench.started] == [1, 2]
    assert bench.started[0].started_after == 2.0
    assert all(bench.was_marked)  # a settlement that overtakes the report must know of it


async def test_a_job_that_waits_for_a_process_has_not_begun_but_can_be_cancelled() -> None:
    bench = Bench()
    waiting = job(1)
    waiting.is_waiting = True
    bench.running = [waiting]
    bench.cancelled = {waiting.task.id: "not needed"}
    await bench.turn()
    assert not bench.started
    assert waiting.halt is Halt.CANCELLED

    waiting.is_waiting = False
    await bench.turn()
    assert [started.task_id.int for started in bench.started] == [1]


async def test_an_outage_is_survived_and_the_report_made_later() -> None:
    bench = Bench()
    bench.running = [job(1)]
    bench.outages = 2
    for _ in range(3):
        await bench.turn()

    assert len(bench.started) == 1
    assert bench.besides == 3


async def test_an_outage_is_met_with_longer_and_longer_pauses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[float | None] = []

    class NotedStop(Stop):
        async def wait(self, seconds: float | None = None) -> bool:
            waits.append(seconds)
            return len(waits) > 4

    monkeypatch.setattr(reporter, "backoff", lambda failures: 100.0 * failures)
    bench = Bench()
    bench.running = [job(1)]
    bench.outages = 2
    await bench.reporter.run(NotedStop())

    assert waits == [0.001, 100.001, 200.001, 0.001, 0.001]


async def test_a_claim_that_somebody_holds_keeps_no_report_and_no_cancellation_of_another() -> None:
    bench = Bench()
    bench.running = [job(1, HELD), job(2), job(3)]
    bench.busy_tokens = {HELD}
    bench.cancelled = {UUID(int=1): "enough", UUID(int=3): "enough"}
    await bench.turn()
    meanwhile = [started.task_id.int for started in bench.started]
    bench.busy_tokens = set()
    await bench.turn()

    assert meanwhile == [2, 3]
    assert [started.task_id.int for started in bench.started] == [2, 3, 1]
    assert [one.halt for one in bench.running] == [Halt.CANCELLED, None, Halt.CANCELLED]


async def test_whoever_lost_a_job_is_told() -> None:
    bench = Bench()
    bench.running = [job(1), job(2)]
    bench.gone = {UUID(int=2)}
    await bench.turn()

    assert bench.lost == [bench.running[1]]


async def test_a_cancellation_reaches_its_job_once() -> None:
    bench = Bench()
    asked, other = job(1), job(2)
    bench.running = [asked, other]
    bench.cancelled = {UUID(int=1): "enough"}
    asked.runner = asyncio.create_task(_for_ever())
    await asyncio.sleep(0)  # it has begun
    await bench.turn()
    await bench.turn()
    requests = asked.runner.cancelling()
    await asyncio.wait([asked.runner])

    assert (asked.halt, asked.halt_reason, other.halt) == (Halt.CANCELLED, "enough", None)
    assert requests == 1


async def _for_ever() -> None:
    await asyncio.Event().wait()
