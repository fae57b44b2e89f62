"""What a worker holds is its own only while it keeps the lease."""

import asyncio
import time
from dataclasses import replace

from acceptance.expiry import expire_claims
from windlass import App, Context, LeaseLost, TaskState
from windlass.model.task import TaskFilter


async def test_leases_of_long_tasks_are_kept_while_the_event_loop_is_blocked(app: App) -> None:
    @app.task(retry=1)
    async def blocking() -> str:
        time.sleep(2.5)  # longer than the lease: only the heart's own thread can keep it
        return "kept"

    handle = await blocking.enqueue()
    await app.run_worker(until_idle=True)

    assert await handle.result(5) == "kept"
    assert (await handle.get()).generation == 1


async def test_a_handler_that_lost_its_lease_enqueues_and_settles_nothing(app: App) -> None:
    lost: list[type[Exception]] = []
    runs = 0

    @app.task
    async def child() -> None: ...

    @app.task
    async def zombie(ctx: Context) -> str:
        nonlocal runs
        runs += 1
        if runs == 1:
            store = await app.store()
            await expire_claims(app)
            await store.rescue(10)
            try:
                await child.enqueue()
            except LeaseLost as error:
                lost.append(type(error))
            await child.options(detached=True).enqueue()
            return "too late"
        return "second owner"

    handle = await zombie.enqueue()
    await app.run_worker(until_idle=True)

    assert lost == [LeaseLost]
    assert await handle.result(5) == "second owner"
    children = await (await app.store()).tasks(TaskFilter(type="child"))
    assert len(children) == 1  # the detached one


async def test_a_lease_lost_before_a_job_began_costs_no_slot(app: App) -> None:
    ran: list[int] = []
    blocked = False

    @app.task
    async def work(n: int) -> None:
        nonlocal blocked
        ran.append(n)
        if not blocked:
            # The rest of the claim is started but has not begun when it is lost.
            blocked = True
            await expire_claims(app)
            await (await app.store()).rescue(10)
            worker._claims_lost(list(worker._outstanding))

    async with app.worker(concurrency=5) as worker:
        handles = await app.enqueue_many([work.call(n) for n in range(10)])
        for handle in handles:
            await handle.result(10)
        async with asyncio.timeout(10):
            while worker.busy():
                await asyncio.sleep(0.01)

    assert set(ran) == set(range(10))


async def test_a_suspect_runs_alone_and_its_start_is_written_first(app: App) -> None:
    beside: list[int] = []
    status: list[str] = []
    running = 0

    @app.task
    async def normal() -> None:
        nonlocal running
        running += 1
        await asyncio.sleep(0.02)
        running -= 1

    @app.task
    async def suspect(ctx: Context) -> None:
        beside.append(running)
        status.append((await app.handle(ctx.task_id).get()).status)

    store = await app.store()
    handle = await suspect.enqueue()
    request = (await app.new_worker())._fetcher._request
    for _ in range(2):
        await store.claim(replace(request, limit=10))
        await expire_claims(app)
        await store.rescue(10)
    await app.enqueue_many([normal.call() for _ in range(30)])
    await app.run_worker(until_idle=True, concurrency=5)

    assert (await handle.get()).status is TaskState.COMPLETED
    assert beside == [0]
    assert status == ["running"]
