"""A worker gives each queue its share, holds limited ones to their limit, and does what it is asked to."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from datetime import datetime

import pytest

from acceptance.quick import QUICK
from windlass import App, TaskState, WorkerNotFound
from windlass.model.task import WorkerRecord
from windlass.runtime.worker import Worker

UNKNOWN = "01890000-0000-7000-8000-000000000000"


async def the_worker(app: App) -> WorkerRecord:
    (record,) = await app.workers.list()
    return record


async def until(worker: Worker, *, paused: bool) -> None:
    async with asyncio.timeout(10):
        while worker._fetchers.is_paused is not paused:
            await asyncio.sleep(0.01)


@pytest.fixture
async def unbuffered(app_url: str) -> AsyncIterator[App]:
    """Shares are kept turn by turn, and one that fills a buffer takes all there is of a queue."""
    async with App(app_url, buffer=0, **QUICK) as app:
        yield app


@pytest.mark.parametrize("concurrency", [1, 4, 40])
async def test_while_two_queues_have_work_each_starts_its_share(
    unbuffered: App, concurrency: int
) -> None:
    app = unbuffered
    started: list[str] = []

    @app.task
    async def work(queue: str) -> None:
        started.append(queue)
        await asyncio.sleep(0)

    calls = [
        work.options(queue=queue).call(queue) for queue in ("bulk", "mail") for _ in range(240)
    ]
    await app.enqueue_many(calls)

    await app.run_worker(
        until_idle=True, queues=["mail:3", "bulk:1"], concurrency=concurrency, shutdown_timeout=5
    )

    assert len(started) == 480
    while_both = Counter(started[:200])
    assert 125 <= while_both["mail"] <= 185  # no finer than a claim
    assert set(started[-100:]) == {"bulk"}  # which has the share of the other by then


@pytest.mark.parametrize("queues", [["mail", "bulk"], ["mail:3", "bulk:1"]])
async def test_no_more_of_a_limited_queue_run_at_once_and_the_others_go_on(
    app: App, queues: list[str]
) -> None:
    running: Counter[str] = Counter()
    most: Counter[str] = Counter()
    others_done = asyncio.Event()
    ended: Counter[str] = Counter()

    @app.task
    async def work(queue: str) -> None:
        running[queue] += 1
        most[queue] = max(most[queue], running[queue])
        if queue == "mail":
            await others_done.wait()  # as long as it takes, others are not held up
        running[queue] -= 1
        ended[queue] += 1
        if ended["bulk"] == 30:
            others_done.set()

    calls = [
        work.options(queue=queue).call(queue)
        for queue, number in (("mail", 20), ("bulk", 30))
        for _ in range(number)
    ]
    await app.enqueue_many(calls)
    async with asyncio.timeout(30):
        await app.run_worker(
            until_idle=True, queues=queues, concurrency=10, queue_concurrency={"mail": 2}
        )

    assert ended == {"mail": 20, "bulk": 30}
    assert most["mail"] == 2


async def test_a_task_for_a_worker_that_sleeps_is_found_at_once_with_weights_and_limits(
    app: App,
) -> None:
    @app.task
    async def work() -> str:
        return "done"

    async with app.worker(queues=["mail:3", "bulk"], queue_concurrency={"mail": 1}):
        for queue in ("mail", "bulk", "mail"):
            handle = await work.options(queue=queue).enqueue()

            assert await handle.result(10) == "done"


async def test_a_paused_worker_finishes_what_it_has_and_claims_nothing_until_it_is_resumed(
    app: App,
) -> None:
    started, finish = asyncio.Event(), asyncio.Event()

    @app.task
    async def work() -> str:
        started.set()
        await finish.wait()
        return "done"

    async with app.worker() as worker:
        first = await work.enqueue()
        await asyncio.wait_for(started.wait(), 10)
        worker_id = (await the_worker(app)).id
        await app.workers.pause(worker_id)
        await until(worker, paused=True)
        finish.set()
        assert await first.result(10) == "done"
        second = await work.enqueue()
        async with asyncio.timeout(10):
            while (await the_worker(app)).idle:
                await asyncio.sleep(0.01)
        record = await the_worker(app)
        status = (await second.get()).status
        await app.workers.resume(worker_id)

        assert record.paused_at is not None
        assert status is TaskState.PENDING
        assert await second.result(10) == "done"
        assert (await the_worker(app)).paused_at is None


async def test_a_worker_that_sleeps_and_is_paused_is_not_idle(app: App) -> None:
    @app.task
    async def work() -> None: ...

    async with app.worker() as worker:
        async with asyncio.timeout(10):
            while not (await the_worker(app)).idle:
                await asyncio.sleep(0.01)
        await app.workers.pause((await the_worker(app)).id)
        await until(worker, paused=True)

        async with asyncio.timeout(10):
            while (await the_worker(app)).idle:
                await asyncio.sleep(0.01)


async def test_a_worker_that_is_drained_finishes_and_ends(app: App) -> None:
    started, finish = asyncio.Event(), asyncio.Event()

    @app.task
    async def work() -> str:
        started.set()
        await finish.wait()
        return "done"

    async with app.worker(concurrency=1) as worker:
        first, second = await app.enqueue_many([work.call(), work.call()])
        await asyncio.wait_for(started.wait(), 10)
        await app.workers.drain((await the_worker(app)).id)
        await asyncio.wait_for(
            worker._stopping.wait(), 10
        )  # it has heard of it, and begins nothing
        finish.set()
        async with asyncio.timeout(10):
            while await app.workers.list():
                await asyncio.sleep(0.01)

    assert await first.result(10) == "done"
    assert (await second.get()).status is TaskState.PENDING


async def test_a_worker_that_nobody_knows_is_named_with_the_way_out(app: App) -> None:
    for order in (app.workers.pause, app.workers.resume, app.workers.drain):
        with pytest.raises(WorkerNotFound, match=f"{UNKNOWN}.*windlass workers list"):
            await order(UNKNOWN)
    with pytest.raises(WorkerNotFound, match=r"'x' is not the id.*windlass workers list"):
        await app.workers.pause("x")


def test_workers_are_asked_from_synchronous_code_too(app_url: str) -> None:
    with App(app_url) as app:
        assert app.workers.list_sync() == app.workers.drain_all_sync(host="nowhere") == []
        for order in (app.workers.pause_sync, app.workers.resume_sync, app.workers.drain_sync):
            with pytest.raises(WorkerNotFound):
                order(UNKNOWN)


@pytest.mark.parametrize("declared", [True, False], ids=["by the application", "by hand"])
@pytest.mark.parametrize("queues", [None, ["mail", "bulk", "other"]], ids=["all", "named"])
async def test_what_is_declared_of_a_queue_counts_for_every_worker(
    unbuffered: App, queues: list[str] | None, declared: bool
) -> None:
    app = unbuffered
    begun: list[str] = []

    @app.task
    async def work(queue: str) -> None:
        begun.append(queue)
        await asyncio.sleep(0)

    if declared:
        app.queue("mail", weight=3)
    else:
        app.queue("mail", weight=1)
        await app.queues.change("mail", weight=3)
    await app.enqueue_many(
        work.options(queue=queue).call(queue) for queue in ("mail", "bulk") for _ in range(400)
    )
    async with asyncio.timeout(30):
        await app.run_worker(until_idle=True, queues=queues, concurrency=10)

    assert 250 <= begun[:400].count("mail") <= 340  # of 400, three quarters are 300
    assert len(begun) == 800


async def test_a_worker_that_runs_shares_by_what_a_queue_weighs_by_now(unbuffered: App) -> None:
    app = unbuffered
    begun: list[str] = []

    @app.task
    async def work(queue: str) -> None:
        begun.append(queue)
        await asyncio.sleep(0)

    async with app.worker(concurrency=10), asyncio.timeout(30):
        await app.queues.change("mail", weight=3)
        beats: set[datetime] = set()
        while (
            len(beats) < 4
        ):  # one it knew, one that may have asked before, its answer, and one after that
            (worker,) = await app.workers.list()
            beats.add(worker.heartbeat_at)
            await asyncio.sleep(0.01)
        handles = await app.enqueue_many(
            work.options(queue=queue).call(queue) for queue in ("mail", "bulk") for _ in range(400)
        )
        await asyncio.gather(*(handle.result() for handle in handles))

    assert 250 <= begun[:400].count("mail") <= 340  # of 400, three quarters are 300


async def test_a_worker_of_all_queues_may_limit_some(app: App) -> None:
    running = most = 0
    ended: Counter[str] = Counter()
    others_done = asyncio.Event()

    @app.task
    async def work(queue: str) -> None:
        nonlocal running, most
        if queue == "mail":
            running += 1
            most = max(most, running)
            await others_done.wait()
            running -= 1
        ended[queue] += 1
        if ended["bulk"] + ended["other"] == 30:
            others_done.set()

    queues = ["mail"] * 10 + ["bulk", "other"] * 15
    await app.enqueue_many(work.options(queue=queue).call(queue) for queue in queues)
    async with asyncio.timeout(30):
        await app.run_worker(until_idle=True, concurrency=10, queue_concurrency={"mail": 2})

    assert (most, ended) == (2, Counter(queues))
