"""A connection on which nothing passes any more costs a worker some time, and nothing else."""

import asyncio
from collections import Counter
from typing import Any

import asyncpg
import pytest

from faults.messages import COMMIT
from faults.proxy import Effect, Point, Proxy, after, before
from faults.scene import DEADLINE
from windlass import App, Handle, TaskCancelled, service
from windlass.client import results
from windlass.store.postgres import connection, statements

SETTINGS: dict[str, Any] = {"lease": 4, "heartbeat": 0.5, "sweep": 0.2, "leader_term": 1.5}
ENDS = "SELECT status::text, attempts, count(*) FROM windlass.history GROUP BY 1, 2"
WOKEN = pytest.mark.needs_direct("there is no listener without one")


@pytest.fixture
def app(proxy: Proxy, database_url: str, monkeypatch: pytest.MonkeyPatch) -> App:
    monkeypatch.setattr(statements, "GIVE_UP_AFTER", 0.05)
    monkeypatch.setattr(connection, "GIVE_UP_AFTER", 0.05)
    monkeypatch.setattr(service, "LONGEST_PATIENCE", 0.5)
    proxy.pass_cancellations = False
    return App(proxy.url(database_url), **SETTINGS)


@pytest.mark.parametrize(
    ("statement", "point"),
    [
        ("claim_tasks", before(COMMIT)),
        ("claim_tasks", after(COMMIT)),
        pytest.param("claim_one", before(COMMIT), marks=WOKEN),
        pytest.param("claim_one", after(COMMIT), marks=WOKEN),
        ("set_idle", after(COMMIT)),
        ("settle_tasks", before(COMMIT)),
        ("settle_tasks", after(COMMIT)),
    ],
    ids=str,
)
async def test_a_worker_goes_on_when_one_of_its_connections_falls_silent(
    app: App, proxy: Proxy, watcher: asyncpg.Connection, statement: str, point: Point
) -> None:
    runs: Counter[int] = Counter()

    @app.task
    async def count_up(number: int) -> None:
        runs[number] += 1

    async with app, app.worker(), asyncio.timeout(DEADLINE):
        rule = proxy.at(point, Effect.HALF_OPEN, text=f"-- {statement}")
        handles: list[Handle] = []
        while not rule.reached.is_set():
            handles.append(await count_up.enqueue(len(handles)))
            await service.first_of(rule.reached.wait(), asyncio.sleep(0.1))
        rule.connections[0].leave_server()
        for _ in range(5):
            handles.append(await count_up.enqueue(len(handles)))
        await asyncio.gather(*(handle.result() for handle in handles))

    assert runs == Counter(range(len(handles)))
    assert [tuple(row) for row in await watcher.fetch(ENDS)] == [("completed", 1, len(handles))]


@pytest.mark.parametrize(
    ("statement", "point"),
    [("read_cancel_requests", after(COMMIT)), ("start_tasks", after("Execute"))],
    ids=str,
)
async def test_a_handler_hears_of_its_cancellation_although_a_connection_fell_silent(
    app: App, proxy: Proxy, statement: str, point: Point
) -> None:
    @app.task
    async def wait() -> None:
        await asyncio.Event().wait()

    async with app, app.worker(), asyncio.timeout(DEADLINE):
        rule = proxy.at(point, Effect.HALF_OPEN, text=f"-- {statement}")
        handle = await wait.enqueue()
        await rule.reached.wait()
        rule.connections[0].leave_server()

        assert await handle.cancel("no more")
        with pytest.raises(TaskCancelled, match="no more"):
            await handle.result()


async def test_a_result_is_heard_of_although_a_connection_fell_silent(
    app: App, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "LONGEST_PATIENCE", 0.5)

    @app.task
    async def one() -> str:
        return "done"

    async with app, asyncio.timeout(DEADLINE):
        handle = await one.enqueue()
        rule = proxy.at(after(COMMIT), Effect.HALF_OPEN, text="-- read_ended")
        waiting = asyncio.create_task(handle.result())
        await rule.reached.wait()
        async with app.worker():
            assert await waiting == "done"
            assert await (await one.enqueue()).result() == "done"


async def test_a_heart_that_met_a_silent_server_as_it_began_beats_in_time(
    app: App, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    finish = asyncio.Event()

    @app.task
    async def wait() -> str:
        await finish.wait()
        return "done"

    async with app, asyncio.timeout(DEADLINE):
        rule = proxy.at(before("Parse"), Effect.HALF_OPEN, text="-- has_migrations")
        async with app.worker():
            handle = await wait.enqueue()
            await rule.reached.wait()
            beaten = proxy.at(after(COMMIT), Effect.DELAY, text="-- pulse")
            await beaten.reached.wait()
            finish.set()

            assert await handle.result() == "done"
            assert (await handle.get()).attempts == 1
    assert "lease.lost" not in caplog.text


@pytest.mark.parametrize("effect", [Effect.CUT, Effect.HALF_OPEN])
@pytest.mark.parametrize("statement", ["register_types", "register_worker"])
async def test_a_worker_that_meets_an_outage_as_it_starts_starts_later(
    app: App, proxy: Proxy, statement: str, effect: Effect
) -> None:
    @app.task
    async def one() -> str:
        return "done"

    async with app, asyncio.timeout(DEADLINE):
        rule = proxy.at(after(COMMIT), effect, text=f"-- {statement}")
        async with app.worker():
            assert rule.reached.is_set()
            assert await (await one.enqueue()).result() == "done"


async def test_a_worker_that_runs_until_it_is_idle_outlives_a_cut(app: App, proxy: Proxy) -> None:
    @app.task
    async def one() -> str:
        return "done"

    async with app, asyncio.timeout(DEADLINE):
        handle = await one.enqueue()
        rule = proxy.at(before(COMMIT), text="-- has_work")

        await app.run_worker(until_idle=True)

        assert rule.reached.is_set()
        assert await handle.result() == "done"
