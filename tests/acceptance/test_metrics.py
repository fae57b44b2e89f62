"""What a worker shows to Prometheus, read with the official client."""

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from importlib import util
from uuid import UUID

import pytest
from prometheus_client.parser import text_string_to_metric_families

from acceptance.probes import fetch
from acceptance.quick import QUICK
from windlass import App, Context, Fail, Retry, TaskFailed
from windlass.model.task import (
    Answer,
    Claim,
    ClaimedTask,
    Outcome,
    QueueRecord,
    Settlement,
    TaskState,
)
from windlass.runtime import metrics as metrics_module
from windlass.runtime.committer import Done, Settled
from windlass.runtime.job import Job
from windlass.runtime.metrics import Distribution, Metrics
from windlass.telemetry import is_watched

LABELS = ("type", "queue", "priority", "status", "outcome", "class")
Samples = dict[tuple[str, tuple[str, ...]], float]


@pytest.fixture
async def app(app_url: str, port: int) -> AsyncIterator[App]:
    async with App(app_url, **QUICK, health_port=port, buffer=0) as app:
        yield app


async def scrape(port: int) -> Samples:
    status, body = await asyncio.to_thread(fetch, port, "/metrics")
    assert status == 200
    return {
        (
            sample.name,
            tuple(sample.labels[name] for name in LABELS if name in sample.labels),
        ): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


async def test_a_worker_counts_what_it_does(app: App, port: int) -> None:
    finish = asyncio.Event()

    @app.task(queue="q", retry=Retry(max_attempts=2, base=0))
    async def work(ctx: Context, how: str) -> None:
        if how == "fail":
            raise Fail("for good")
        if how == "retry" and ctx.attempt == 1:
            raise ValueError("not yet")
        if how == "long":
            await finish.wait()

    async with app.worker(concurrency=3):
        before = await scrape(port)
        handles = [await work.enqueue(how) for how in ("", "", "fail", "retry", "long")]
        await work.options(idempotency_key="k").enqueue("")
        await work.options(idempotency_key="k").enqueue("")
        for handle in handles[:4]:
            with suppress(TaskFailed):
                await handle.result(timeout=10)
        completed = ("windlass_tasks_ended_total", ("work", "q", "completed"))
        async with asyncio.timeout(20):
            while (await scrape(port)).get(completed, 0) < 4:
                await asyncio.sleep(0.02)
        seen = await scrape(port)
        finish.set()

    assert before["windlass_slots", ()] == 3
    assert before["windlass_slots_busy", ()] == 0
    labels = ("work", "q")
    assert seen["windlass_tasks_enqueued_total", labels] == 6
    assert seen["windlass_tasks_claimed_total", labels] == 7
    assert {
        key[1][2]: value for key, value in seen.items() if key[0] == "windlass_tasks_ended_total"
    } == {"completed": 4, "failed": 1, "retried": 1}
    assert {
        key[1][2]: value for key, value in seen.items() if key[0] == "windlass_task_errors_total"
    } == {"permanent-input": 1, "unknown": 1}
    assert seen["windlass_task_duration_seconds_count", labels] == 6
    assert seen["windlass_task_wait_seconds_count", labels] == 7
    assert seen["windlass_task_wait_seconds_sum", labels] >= 0
    assert seen["windlass_queue_wait_seconds_count", ("q", "normal")] == 7
    assert seen["windlass_slots_busy", ()] == 1
    assert seen["windlass_claim_tasks_sum", ()] == 7
    assert seen["windlass_settle_tasks_sum", ()] == 6


async def test_threads_that_hang_are_shown(database_url: str, port: int) -> None:
    app = App(database_url, **QUICK, health_port=port)
    finish = threading.Event()

    @app.task(timeout=0.1, retry=1)
    def hang() -> None:
        finish.wait(60)

    async with app, app.worker():
        await hang.enqueue()
        shown = []
        async with asyncio.timeout(20):
            while 1 not in shown:
                shown.append((await scrape(port))["windlass_stuck_threads", ()])
            finish.set()
            while shown[-1] != 0:
                shown.append((await scrape(port))["windlass_stuck_threads", ()])


async def test_a_task_completed_by_its_handler_counts_as_completed(
    database_url: str,
    port: int,
) -> None:
    app = App(database_url, **QUICK, health_port=port)

    @app.task
    async def work(ctx: Context) -> None:
        async with ctx.transaction():
            pass

    async with app, app.worker():
        await (await work.enqueue()).result(timeout=10)
        key = ("windlass_tasks_ended_total", ("work", "default", "completed"))
        async with asyncio.timeout(20):
            while key not in await scrape(port):
                await asyncio.sleep(0.02)


async def test_the_leader_shows_how_many_tasks_wait(app: App, port: int) -> None:
    await app.enqueue("unknown", queue="slow")
    await app.enqueue("unknown", queue="slow")
    await app.enqueue("unknown", delay=60)
    async with app.worker():
        async with asyncio.timeout(20):
            while ("windlass_queue_tasks", ("slow", "pending")) not in await scrape(port):
                await asyncio.sleep(0.02)
        seen = await scrape(port)
        assert seen["windlass_queue_tasks", ("slow", "pending")] == 2
        assert seen["windlass_queue_tasks", ("default", "scheduled")] == 1


def test_depths_are_shown_by_the_leader_and_queues_without_end_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metrics_module, "MOST_LABELS", 1)
    is_leader = True
    metrics = Metrics(lambda: (0, 1), lambda: is_leader)
    metrics("counted", [QueueRecord(name, False, {TaskState.PENDING: 2}, None) for name in "abc"])

    def depths() -> dict[str, float]:
        (depth,) = [one for one in metrics.collect() if one.name == "windlass_queue_tasks"]
        return {sample.labels["queue"]: sample.value for sample in depth.samples}

    assert depths() == {"a": 2, "others": 4}
    is_leader = False
    assert depths() == {}


def test_batches_are_counted_up_to_each_bound() -> None:
    sizes = metrics_module.Sizes()
    for size in (1, 3, 3, 10, 500, 700):
        sizes.add(size)

    buckets, total = sizes.read()

    assert dict(buckets) == {
        "1.0": 1,
        "2.0": 1,
        "5.0": 3,
        "10.0": 4,
        "20.0": 4,
        "50.0": 4,
        "100.0": 4,
        "200.0": 4,
        "500.0": 5,
        "+Inf": 6,
    }
    assert total == 1217


def settled(batch: list[Done], answers: list[Answer]) -> Settled:
    claims = Counter([done.job.claim for done in batch])
    return Settled(batch, claims, [done.settlement.outcome for done in batch], answers)


def test_batches_of_several_queues_and_outcomes_are_taken_apart() -> None:
    def ended(queue: str, outcome: Outcome) -> Done:
        task = ClaimedTask(UUID(int=1), "work", queue, 10, "{}", 0, 4, 1, None)
        job = Job(Claim(UUID(int=2), 1, (task,)), task, 0.0, started_at=1.0, took=1.0)
        return Done(job, Settlement(UUID(int=2), task.id, 1, outcome))

    metrics = Metrics(lambda: (0, 1), lambda: False)
    done, lost, dead = Outcome.COMPLETED, Answer.LOST, Outcome.DEAD
    told = [(ended("a", done), Answer.APPLIED), (ended("b", done), Answer.APPLIED)]
    for batch in (told, [*told, (ended("a", done), lost), (ended("b", dead), Answer.APPLIED)]):
        metrics("settled", settled([done for done, _ in batch], [answer for _, answer in batch]))

    (family,) = [one for one in metrics.collect() if one.name == "windlass_tasks_ended"]
    counts = {
        (sample.labels["queue"], sample.labels["outcome"]): sample.value
        for sample in family.samples
    }
    assert counts == {
        ("a", "completed"): 2,
        ("b", "completed"): 2,
        ("a", "lost"): 1,
        ("b", "dead"): 1,
    }


@pytest.mark.parametrize("is_known", [True, False])
def test_what_is_known_of_claims_counts_the_same_as_a_look_at_each_task(is_known: bool) -> None:
    metrics = Metrics(lambda: (0, 1), lambda: False)
    batch: list[Done] = []
    for number, queues in enumerate(("aa", "a", "b", "ab")):
        tasks = tuple(
            ClaimedTask(UUID(int=place), "work", queue, 10, "{}", 0, 4, 1, None)
            for place, queue in enumerate(queues)
        )
        kind = ("work", queues[0]) if is_known and len(set(queues)) == 1 else None
        claim = Claim(UUID(int=number), 1, tasks, kind=kind)
        metrics("claimed", claim)
        jobs = [Job(claim, task, 0.0, started_at=1.0, took=1.0) for task in tasks]
        done = [
            Done(job, Settlement(claim.token, job.task.id, 1, Outcome.COMPLETED)) for job in jobs
        ]
        metrics("settled", settled(done, [Answer.APPLIED] * len(done)))
        batch += done
    metrics("settled", settled(batch[:3], [Answer.APPLIED] * 3))  # two claims of one kind
    metrics("settled", settled(batch, [Answer.APPLIED] * len(batch)))

    counts = {
        (one.name, sample.labels["queue"]): sample.value
        for one in metrics.collect()
        for sample in one.samples
        if sample.name in {"windlass_tasks_ended_total", "windlass_task_duration_seconds_count"}
    }
    ended, durations = "windlass_tasks_ended", "windlass_task_duration_seconds"
    assert counts == {
        (ended, "a"): 11,
        (ended, "b"): 4,
        (durations, "a"): 11,
        (durations, "b"): 4,
    }


@pytest.mark.parametrize(
    ("answers", "counts"),
    [
        ([Answer.APPLIED, Answer.LOST, Answer.APPLIED], {"completed": 2, "lost": 1}),
        ([Answer.LOST] * 3, {"lost": 3}),
    ],
)
def test_what_was_completed_too_late_counts_as_lost_in_a_batch_of_one_kind(
    answers: list[Answer], counts: dict[str, int]
) -> None:
    tasks = tuple(
        ClaimedTask(UUID(int=place), "work", "a", 10, "{}", 0, 4, 1, None) for place in range(3)
    )
    claim = Claim(UUID(int=9), 1, tasks, kind=("work", "a"))
    jobs = [Job(claim, task, 0.0, started_at=1.0, took=1.0) for task in tasks]
    batch = [Done(job, Settlement(claim.token, job.task.id, 1, Outcome.COMPLETED)) for job in jobs]
    metrics = Metrics(lambda: (0, 1), lambda: False)

    metrics("settled", settled(batch, answers))

    (ends,) = [one for one in metrics.collect() if one.name == "windlass_tasks_ended"]
    assert {sample.labels["outcome"]: sample.value for sample in ends.samples} == counts


def test_an_attempt_that_never_began_has_no_duration() -> None:
    task = ClaimedTask(UUID(int=1), "work", "a", 10, "{}", 0, 4, 1, None)
    job = Job(Claim(UUID(int=2), 1, (task,)), task, 0.0)
    released = Done(job, Settlement(UUID(int=2), task.id, 1, Outcome.RELEASED))
    metrics = Metrics(lambda: (0, 1), lambda: False)

    metrics("settled", settled([released], [Answer.APPLIED]))

    (durations,) = [
        one for one in metrics.collect() if one.name == "windlass_task_duration_seconds"
    ]
    (ends,) = [one for one in metrics.collect() if one.name == "windlass_tasks_ended"]
    assert durations.samples == []
    assert [sample.value for sample in ends.samples] == [1]


async def test_what_was_lost_with_its_lease_is_counted_as_such(app: App, port: int) -> None:
    started = asyncio.Event()

    @app.task
    async def work() -> None:
        started.set()
        await asyncio.Event().wait()

    async with app.worker() as worker:
        await work.enqueue()
        await started.wait()
        (job,) = worker._slots.running()
        worker._slots.claims_lost([job.claim.token])
        counted = await scrape(port)

    assert counted["windlass_tasks_ended_total", ("work", "default", "lost")] == 1


async def test_nobody_is_told_once_the_worker_has_ended(app: App) -> None:
    await app.run_worker(until_idle=True)

    assert not is_watched()


async def test_without_the_extra_the_page_says_how_to_get_it(
    app: App,
    port: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = util.find_spec
    monkeypatch.setattr(
        "windlass.runtime.measuring.find_spec",
        lambda name: None if name == "prometheus_client" else found(name),
    )
    async with app.worker():
        status, body = await asyncio.to_thread(fetch, port, "/metrics")

    assert status == 501
    assert b"pip install prometheus-client" in body


@pytest.mark.parametrize("at_once", [0, 1000])
def test_a_distribution_counts_each_value_once_in_its_bucket(
    monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(metrics_module, "SORTED_AT_ONCE", at_once)
    distribution = Distribution((1, 2, 5))
    for values in ([0.5, 6], [1, 1.5], [], [5]):
        distribution.add(values)

    for _ in range(2):
        assert distribution.read() == ([("1.0", 2), ("2.0", 3), ("5.0", 4), ("+Inf", 5)], 14)


def test_types_and_queues_without_end_are_counted_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metrics_module, "MOST_LABELS", 2)
    metrics = Metrics(lambda: (0, 1), lambda: False)

    labels = [metrics._labels(f"type {n}", "q") for n in (1, 2, 3, 1, 4)]

    assert labels == [
        *[("type 1", "q"), ("type 2", "q"), ("others", "others")],
        *[("type 1", "q"), ("others", "others")],
    ]
    assert len(metrics._known) == 3
