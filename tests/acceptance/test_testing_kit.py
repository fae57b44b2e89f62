"""The kit for users' own tests: an application in memory, and a clock that moves."""

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from windlass import App, ConfigurationError, Context, Retry, Snooze, Task, testing
from windlass.model.task import ClaimRequest

NOWHERE = "postgresql://nobody@127.0.0.1:1/nothing"


@dataclass
class Order:
    id: UUID
    at: datetime


ORDER = Order(UUID(int=7), datetime(2030, 1, 1, tzinfo=UTC))


@pytest.fixture
def app() -> App:
    return App(NOWHERE)


@pytest.fixture
def resize(app: App) -> Task[[str, int], Any]:
    @app.task
    async def resize(image: str, width: int = 100) -> int:
        return width

    return resize


async def test_an_app_keeps_its_tasks_in_memory_inside_the_block(
    app: App, resize: Task[[str, int], Any]
) -> None:
    async with testing.app_in_memory(app) as inside:
        assert inside is app
        handle = await resize.enqueue("a.png", 200)
        await testing.drain(app)
        assert await handle.result(timeout=1) == 200

    assert app.url == NOWHERE
    async with testing.app_in_memory(app):
        assert testing.enqueued(app, resize) == []


def test_synchronous_code_has_it_too(app: App, resize: Task[[str, int], Any]) -> None:
    with testing.app_in_memory(app):
        handle = resize.enqueue_sync("a.png", 200)
        testing.assert_enqueued(app, resize, image="a.png")
        asyncio.run(testing.drain(app))
        assert handle.result_sync(timeout=1) == 200


async def test_what_was_enqueued_is_found_by_its_arguments(
    app: App, resize: Task[[str, int], Any]
) -> None:
    @app.task
    async def ship(order: Order) -> None: ...

    async with testing.app_in_memory(app):
        await resize.enqueue("a.png", 1)
        await resize.enqueue("a.png", 2)
        await ship.options(queue="bulk").enqueue(ORDER)

        assert testing.assert_enqueued(app, resize, image="a.png").payload["width"] == 2
        assert testing.assert_enqueued(app, "resize", width=1).status == "pending"
        assert testing.assert_enqueued(app, ship, order=ORDER).queue == "bulk"
        assert len(testing.enqueued(app, resize)) == 2
        with pytest.raises(
            AssertionError, match=r"'resize' was not enqueued with .*'b.png'.*'a.png'"
        ):
            testing.assert_enqueued(app, resize, image="b.png")
        with pytest.raises(AssertionError, match="and not at all"):
            testing.assert_enqueued(app, "other")
        await testing.drain(app)
        assert testing.assert_enqueued(app, resize, width=1).status == "completed"


async def test_a_drain_runs_what_is_enqueued_meanwhile_and_leaves_what_is_not_due(
    app: App,
) -> None:
    runs: list[int] = []

    @app.task
    async def again(n: int) -> None:
        runs.append(n)
        if n:
            await again.enqueue(n - 1)

    async with testing.app_in_memory(app):
        await again.enqueue(3)
        await again.options(delay=3600).enqueue(0)
        await testing.drain(app)

        assert runs == [3, 2, 1, 0]


async def test_the_clock_moves_what_is_scheduled_retried_and_snoozed(app: App) -> None:
    clock, runs = testing.Clock(), list[str]()

    @app.task
    async def later(name: str) -> None:
        runs.append(name)

    @app.task(retry=Retry(max_attempts=2, backoff="fixed", base=600, jitter="none"))
    async def flaky(ctx: Context) -> None:
        runs.append(f"attempt {ctx.attempt}")
        if ctx.attempt == 1:
            raise ValueError("not yet")

    @app.task
    async def sleepy(ctx: Context) -> None:
        runs.append("sleepy")
        if runs.count("sleepy") == 1:
            raise Snooze(1800)

    async with testing.app_in_memory(app, clock=clock):
        await later.options(delay=timedelta(hours=1)).enqueue("delayed")
        await later.options(at=clock() + timedelta(hours=2)).enqueue("at")
        await flaky.enqueue()
        await sleepy.enqueue()
        expected = [{"attempt 1", "sleepy"}, {"attempt 2"}, {"sleepy"}, {"delayed"}, {"at"}]
        for seconds, wanted in zip((0, 600, 1200, 1800, 3600), expected, strict=True):
            clock.move(seconds)
            runs_before = len(runs)
            await testing.drain(app)
            assert set(runs[runs_before:]) == wanted


async def test_the_clock_is_noticed_by_a_worker_that_runs() -> None:
    app = App(NOWHERE, poll=600)  # so that it does not look by itself
    clock = testing.Clock(datetime(2030, 1, 1, tzinfo=UTC))

    @app.task
    async def later() -> str:
        return "done"

    async with testing.app_in_memory(app, clock=clock), app.worker():
        handle = await later.options(delay=3600).enqueue()
        assert (await handle.get()).created_at.year == 2030
        clock.move(timedelta(hours=1))
        assert await handle.result(timeout=10) == "done"


async def test_the_clock_moves_leases(app: App) -> None:
    clock = testing.Clock()
    runs: list[int] = []

    @app.task
    async def work(ctx: Context) -> None:
        runs.append(ctx.attempt)

    async with testing.app_in_memory(app, clock=clock):
        handle = await work.enqueue()
        lease, ageing = timedelta(seconds=30), timedelta(seconds=6)
        lost = ClaimRequest(UUID(int=1), ("work",), 1, lease, ageing, None)
        assert (await (await app.store()).claim(lost)).claim is not None
        clock.move(lease)
        await testing.drain(app)
        assert runs == [1]
        assert (await handle.get()).status == "completed"


async def test_outside_of_the_block_the_kit_says_so(app: App) -> None:
    with pytest.raises(ConfigurationError, match=r"testing.app_in_memory\(app\)"):
        testing.assert_enqueued(app, "resize")
    with pytest.raises(ConfigurationError, match=r"testing.app_in_memory\(app\)"):
        await testing.drain(app)


@pytest.mark.parametrize("by", [-1, float("nan"), "1 h"])
def test_a_clock_moves_ahead_by_seconds(by: object) -> None:
    with pytest.raises(ConfigurationError, match="move"):
        testing.Clock().move(by)  # type: ignore[arg-type]  # on purpose
    with pytest.raises(ConfigurationError, match="no time zone"):
        testing.Clock(datetime(2030, 1, 1))  # noqa: DTZ001 - on purpose


async def test_synchronous_calls_beside_a_coroutine_are_closed_with_the_block(app: App) -> None:
    async with testing.app_in_memory(app):
        handle = await asyncio.to_thread(app.enqueue_sync, "greet", {"name": "ada"})
        assert (await handle.get()).status == "pending"
