"""A worker claims for its processes what they can run, and for its slots what those can, side by side."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from acceptance.processes import handlers
from acceptance.processes.looking import WITHIN, noted, until
from acceptance.quick import QUICK
from windlass import App, TaskState
from windlass.model.task import TaskFilter

MANY = 30


async def states(app: App) -> Counter[TaskState]:
    page = await (await app.store()).tasks(TaskFilter(type="wait_for", limit=100))
    return Counter(record.status for record in page.records)


@pytest.mark.parametrize("is_mixed", [False, True])
async def test_a_worker_takes_no_more_than_its_processes_can_run(
    app_url: str, tmp_path: Path, is_mixed: bool
) -> None:
    async with App(app_url, **QUICK, processes=2) as app:
        wait_for = app.task(run="process")(handlers.wait_for)
        if is_mixed:

            @app.task
            async def quick() -> None: ...

        paths = [(str(tmp_path / str(n)), str(tmp_path / "let go")) for n in range(MANY)]
        async with app.worker(shutdown_timeout=0), asyncio.timeout(WITHIN):
            await app.enqueue_many([wait_for.call(*each) for each in paths])
            await until(lambda: len(list(tmp_path.iterdir())) == 2)
            if is_mixed:
                await (await quick.enqueue()).result()  # so the worker has looked for more
            found = await states(app)
            busy = found[TaskState.CLAIMED] + found[TaskState.RUNNING]

            assert busy == 2
            assert found[TaskState.PENDING] == MANY - busy


async def test_others_begin_although_processes_are_busy_and_more_waits_for_them(
    app_url: str, tmp_path: Path
) -> None:
    async with App(app_url, **QUICK, processes=1) as app:
        wait_for = app.task(run="process", priority="critical")(handlers.wait_for)

        @app.task(priority="low")
        async def quick(n: int) -> int:
            return n

        let_go = tmp_path / "let go"
        async with app.worker(concurrency=1), asyncio.timeout(WITHIN):
            calls = [wait_for.call(str(tmp_path / str(n)), str(let_go)) for n in range(5)]
            handles = await app.enqueue_many(calls)
            await until(lambda: list(tmp_path.iterdir()))
            others = await app.enqueue_many([quick.call(n) for n in range(20)])
            assert [await other.result() for other in others] == list(range(20))
            assert not any(
                [(await handle.get()).status is TaskState.COMPLETED for handle in handles]
            )

            let_go.touch()
            assert len({await handle.result() for handle in handles}) == 1


async def test_processes_begin_although_every_slot_is_taken(app_url: str, tmp_path: Path) -> None:
    async with App(app_url, **QUICK, processes=1) as app:
        note = app.task(run="process")(handlers.note)
        held, let_go = asyncio.Event(), asyncio.Event()

        @app.task
        async def hold() -> None:
            held.set()
            await let_go.wait()

        async with app.worker(concurrency=1), asyncio.timeout(WITHIN):
            holding = await hold.enqueue()
            await held.wait()
            await (await note.enqueue(str(tmp_path / "noted"))).result()
            let_go.set()
            await holding.result()


async def test_an_idle_worker_is_woken_for_either_kind(app_url: str, tmp_path: Path) -> None:
    async with App(app_url, **QUICK, processes=1, poll=3600) as app:
        note = app.task(run="process")(handlers.note)

        @app.task
        async def quick() -> str:
            return "quick"

        async with app.worker() as worker, asyncio.timeout(WITHIN):
            for fetcher in worker._fetchers.fetchers:
                fetcher._pause = 3600.0  # no poll will find it
            for n in range(3):
                await until(lambda: all(one.idle for one in worker._fetchers.fetchers))
                await (await note.enqueue(str(tmp_path / str(n)))).result()
                assert await (await quick.enqueue()).result() == "quick"


async def test_a_worker_of_both_kinds_drains_until_idle(app_url: str, tmp_path: Path) -> None:
    async with App(app_url, **QUICK, processes=2) as app:
        square = app.task(run="process")(handlers.square)

        @app.task
        async def quick(n: int) -> int:
            return -n

        handles = [
            handle
            for n in range(20)
            for handle in (await square.enqueue(n), await quick.enqueue(n))
        ]
        async with asyncio.timeout(WITHIN):
            await app.run_worker(until_idle=True)

        found = [await handle.result(5) for handle in handles]
        assert found == [value for n in range(20) for value in (n * n, -n)]


async def test_no_more_processes_are_used_than_may_run_at_once(tmp_path: Path) -> None:
    async with App("memory:", processes=4) as app:
        app.task(run="process")(handlers.square)
        async with app.worker(concurrency=2) as worker:
            pool: Any = worker._processes
            assert pool.filled == (0, 2)
            (listed,) = await (await app.store()).workers()
        assert listed.capacity == 2


async def test_a_job_of_a_lost_claim_is_settled_by_the_room_that_took_it(
    app_url: str, tmp_path: Path
) -> None:
    async with App(app_url, **QUICK, processes=1) as app:
        note = app.task(run="process")(handlers.note)

        @app.task
        async def quick() -> None: ...

        async with app.worker() as worker, asyncio.timeout(WITHIN):
            for n in range(3):
                handles = [await note.enqueue(str(tmp_path / str(n))), await quick.enqueue()]
                for handle in handles:
                    await handle.result()
            await noted(tmp_path / "2")
            await until(lambda: not any(slots._outstanding for slots in worker._all_slots))
            assert worker._leases.tokens() == []
