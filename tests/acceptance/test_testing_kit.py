"""The kit for users' own tests: an application in memory, and a clock that moves."""

import asyncio
import socket
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from unittest import mock
from uuid import UUID

import pytest

from windlass import App, ConfigurationError, Context, Retry, Snooze, Task, testing
from windlass.model.task import ClaimAnswer, ClaimRequest
from windlass.runtime import fetcher

NOWHERE = "postgresql://nobody@127.0.0.1:1/nothing"


@dataclass
class Order:
    id: UUID
    at: datetime


@dataclass(eq=False)
class Parcel:
    weight: int


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


async def test_tasks_may_have_arguments_of_any_name(app: App) -> None:
    @app.task
    async def assign(task: str, app: str) -> None: ...

    async with testing.app_in_memory(app):
        await assign.enqueue("write", app="shop")

        testing.assert_enqueued(app, assign, task="write", app="shop")
        assert testing.enqueued(app, assign, task="read") == []


async def test_arguments_left_at_their_default_are_found_as_the_handler_gets_them(
    app: App, resize: Task[..., Any]
) -> None:
    @app.task
    async def ship(order: Order = ORDER, to: str | None = None) -> None: ...

    async with testing.app_in_memory(app):
        await resize.enqueue("a.png")
        await ship.enqueue()

        testing.assert_enqueued(app, resize, width=100)
        testing.assert_enqueued(app, "resize", image="a.png", width=100)
        testing.assert_enqueued(app, ship, order=ORDER, to=None)
        assert testing.enqueued(app, resize, width=None) == []
        with pytest.raises(AssertionError, match=r"but with .*'width': 100"):
            testing.assert_enqueued(app, resize, width=200)


async def test_arguments_are_compared_as_values_in_whatever_form_they_are_given(app: App) -> None:
    @app.task
    async def ship(order: Order, sizes: dict[int, float], at: datetime, parcel: Parcel) -> None: ...

    elsewhere = ORDER.at.astimezone(timezone(timedelta(hours=2)))
    async with testing.app_in_memory(app):
        await ship.enqueue(ORDER, {1: 0.5}, ORDER.at, Parcel(3))

        testing.assert_enqueued(app, ship, at=elsewhere, order=Order(ORDER.id, elsewhere))
        testing.assert_enqueued(app, ship, at=elsewhere.isoformat(), sizes={1: 0.5})
        testing.assert_enqueued(
            app, ship, order={"id": str(ORDER.id), "at": "2030-01-01T00:00:00Z"}
        )
        testing.assert_enqueued(app, ship, order={"id": str(ORDER.id), "at": elsewhere.isoformat()})
        testing.assert_enqueued(app, ship, order=mock.ANY, parcel=Parcel(3))
        assert testing.enqueued(app, ship, at=ORDER.at + timedelta(seconds=1)) == []
        assert testing.enqueued(app, ship, order=object()) == []


async def test_a_payload_that_the_code_cannot_read_is_compared_as_json(app: App) -> None:
    async with testing.app_in_memory(app):
        await app.enqueue("ship", {"at": "soon", "to": [1]})

        @app.task
        async def ship(at: datetime, to: list[int], width: int = 100) -> None: ...

        testing.assert_enqueued(app, ship, at="soon", to=(1,))
        assert testing.enqueued(app, ship, at=ORDER.at) == []
        assert testing.enqueued(app, ship, width=100) == []


async def test_a_misspelt_argument_is_noticed(app: App, resize: Task[[str, int], Any]) -> None:
    @app.task
    async def tick(ctx: Context) -> None: ...

    async with testing.app_in_memory(app):
        await app.enqueue("other", {"a": 1})

        with pytest.raises(
            TypeError, match="'resize': argument 'imgae' is not known; arguments are: image, width"
        ):
            testing.enqueued(app, resize, imgae="a.png")
        with pytest.raises(TypeError, match="'imgae'"):
            testing.assert_enqueued(app, "resize", imgae="a.png")
        with pytest.raises(TypeError, match="'ctx' is not known; arguments are: none"):
            testing.enqueued(app, tick, ctx=1)
        assert testing.enqueued(app, "other", b=1) == []


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


async def test_the_clock_is_noticed_by_a_worker_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetcher, "SHORTEST_POLL", 600)  # so that it does not look by itself
    app = App(NOWHERE, poll=600, sweep=600)
    clock, looks = testing.Clock(datetime(2030, 1, 1, tzinfo=UTC)), asyncio.Semaphore(0)

    @app.task
    async def later() -> str:
        return "done"

    async with testing.app_in_memory(app, clock=clock):
        store = app.memory
        assert store is not None
        claim = store.claim

        async def look(request: ClaimRequest) -> ClaimAnswer:
            answer = await claim(request)
            looks.release()
            return answer

        monkeypatch.setattr(store, "claim", look)
        handle = await later.options(delay=3600).enqueue()
        async with app.worker():
            async with asyncio.timeout(10):
                await looks.acquire()
                await looks.acquire()  # it looks again once it is idle, and then waits
            assert (await handle.get()).created_at.year == 2030
            clock.move(timedelta(hours=1))
            assert await handle.result(timeout=10) == "done"


async def test_the_clock_moves_leases() -> None:
    app = App(NOWHERE, leader_term=600)
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
        # Somebody else leads, so that the worker of the drain does not rescue.
        term = timedelta(seconds=600)
        assert await (await app.store()).lead(UUID(int=2), current=None, term=term) is not None
        async with asyncio.timeout(10):
            await testing.drain(app)
        assert runs == [1]
        assert (await handle.get()).status == "completed"


async def test_outside_of_the_block_the_kit_says_so(app: App) -> None:
    with pytest.raises(ConfigurationError, match=r"testing.app_in_memory\(app\).*handle.get\(\)"):
        testing.assert_enqueued(app, "resize")
    with pytest.raises(
        ConfigurationError, match=r"testing.app_in_memory\(app\).*run_worker\(until_idle=True\)"
    ):
        await testing.drain(app)


async def test_a_drain_opens_no_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        app = App(NOWHERE, health_port=taken.getsockname()[1])

        @app.task
        async def work() -> str:
            return "done"

        async with testing.app_in_memory(app):
            handle = await work.enqueue()
            await testing.drain(app)
            assert await handle.result(timeout=1) == "done"


async def test_a_drain_that_is_cancelled_leaves_no_handler_behind() -> None:
    app = App(NOWHERE, shutdown_timeout=0)
    began, ended = asyncio.Event(), asyncio.Event()

    @app.task
    async def hang() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with testing.app_in_memory(app):
        await hang.enqueue()
        draining = asyncio.create_task(testing.drain(app))
        async with asyncio.timeout(10):
            await began.wait()
        draining.cancel()
        with pytest.raises(asyncio.CancelledError):
            await draining
        assert ended.is_set()


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
