"""What a worker holds is its own only while it keeps the lease."""

import asyncio
import math
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from uuid import UUID

import asyncpg
import pytest

from acceptance.expiry import expire_claims
from windlass import App, Context, LeaseLost, TaskState
from windlass.model.errors import StoreUnavailable
from windlass.model.task import ENDS, TaskFilter


async def test_leases_of_long_tasks_are_kept_while_the_event_loop_is_blocked(app: App) -> None:
    @app.task(retry=1)
    async def blocking() -> str:
        time.sleep(2.5)  # longer than the lease: only the heart's own thread can keep it
        return "kept"

    handle = await blocking.enqueue()
    await app.run_worker(until_idle=True)

    assert await handle.result(5) == "kept"
    assert (await handle.get()).generation == 1


SLOW_COMMITS = """
CREATE FUNCTION public.linger() RETURNS trigger LANGUAGE plpgsql
AS $$ BEGIN PERFORM pg_sleep(0.05); RETURN NULL; END $$;
CREATE CONSTRAINT TRIGGER linger AFTER UPDATE ON windlass.claim DEFERRABLE INITIALLY DEFERRED
FOR EACH ROW WHEN (NEW.remaining < OLD.remaining) EXECUTE FUNCTION public.linger();
"""


async def test_a_worker_whose_settlements_nearly_always_hold_its_claim_keeps_it(
    database_url: str, sql_url: str
) -> None:
    connection = await asyncpg.connect(sql_url)
    await connection.execute(SLOW_COMMITS)
    await connection.close()
    runs: Counter[int] = Counter()
    async with App(database_url, lease=1.5, heartbeat=0.3, sweep=0.2) as app:

        @app.task
        async def spread(n: int) -> None:
            runs[n] += 1
            await asyncio.sleep(0.2 + n * 0.02)

        await app.enqueue_many([spread.call(n) for n in range(250)])
        await app.run_worker(until_idle=True, concurrency=250)

    assert runs == dict.fromkeys(range(250), 1)


async def test_a_handler_that_lost_its_lease_enqueues_and_settles_nothing(app: App) -> None:
    kept: list[object] = []
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
            detached = child.options(detached=True)
            for enqueue in (
                child.enqueue,
                lambda: app.enqueue("child"),
                lambda: app.enqueue("of another program"),
                lambda: app.enqueue_many([detached.call(), child.call()]),
            ):
                with suppress(LeaseLost):
                    await enqueue()
                    kept.append(enqueue)
            await detached.enqueue()
            await app.enqueue("child", detached=True)
            return "too late"
        return "second owner"

    handle = await zombie.enqueue()
    await app.run_worker(until_idle=True)

    assert kept == []
    assert await handle.result(5) == "second owner"
    children = (await (await app.store()).tasks(TaskFilter(type="child"))).records
    assert len(children) == 2  # the detached ones


async def test_a_lease_lost_before_a_job_began_costs_no_slot_and_no_run(app: App) -> None:
    ran: list[int] = []
    lost = asyncio.Event()

    @app.task
    async def work(n: int) -> None:
        ran.append(n)
        if not lost.is_set():
            # The rest of the claim has its slots but has not begun.
            worker._slots.claims_lost(list(worker._slots._outstanding))
            lost.set()

    async with app.worker(concurrency=5) as worker:
        handles = await app.enqueue_many([work.call(n) for n in range(5)])
        await asyncio.wait_for(lost.wait(), 10)
        await expire_claims(app)
        await (await app.store()).rescue(10)
        for handle in handles:
            await handle.result(10)
        await asyncio.wait_for(worker._slots.emptied(), 10)

    assert sorted(ran) == [0, 0, 1, 2, 3, 4]


class Unreachable:
    """A store as the heart sees it when its own connection fails and the worker's does not."""

    async def open(self) -> None:
        raise StoreUnavailable("unreachable")

    async def close(self) -> None: ...


async def test_what_cannot_be_kept_is_stopped_and_neither_written_nor_begun(
    app_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []
    held: list[int] = []
    begun = asyncio.Event()
    # Nobody rescues them, so the store would still accept what is settled.
    async with App(app_url, lease=2, heartbeat=0.5, sweep=600, buffer_seconds=600) as app:

        @app.task
        async def stubborn(n: int) -> str:
            ran.append(n)
            held.append(worker._slots.busy())
            begun.set()
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            return "too late"

        monkeypatch.setattr(await app.store(), "beside", Unreachable)
        handles = await app.enqueue_many([stubborn.call(n) for n in range(3)])
        worker = await app.new_worker(concurrency=1)
        # As if tasks had been short until now: the other two wait in the buffer.
        worker._slots._rate, worker._slots._empty_since = 1e9, math.inf
        running = asyncio.create_task(worker.run())
        await asyncio.wait_for(begun.wait(), 10)
        await asyncio.wait_for(worker._slots.emptied(), 10)
        worker.stop()
        await running
        records = [await handle.get() for handle in handles]

    assert (ran, held) == ([0], [3])
    assert not {record.status for record in records} & ENDS
    assert [record.generation for record in records] == [1, 1, 1]


async def test_a_worker_that_was_removed_while_it_was_silent_comes_back(app: App) -> None:
    async with app.worker():
        store = await app.store()
        (before,) = await store.workers()
        await store.deregister(UUID(str(before.id)))
        async with asyncio.timeout(10):
            while not await store.workers():
                await asyncio.sleep(0.05)
        (after,) = await store.workers()

    assert after.id == before.id


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
