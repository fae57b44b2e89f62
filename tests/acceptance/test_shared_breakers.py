"""Breakers that workers share: what one of them finds out spares the others."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, suppress

import pytest

from acceptance.quick import QUICK
from windlass import App, Breaker, BreakerOpen


class Down(ConnectionError):  # noqa: N818 - as it is said
    """What a dependency that is down raises."""


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


async def open_by(breaker: Breaker) -> None:
    while breaker.state == "closed":
        with pytest.raises(Down):
            async with breaker:
                raise Down


@pytest.fixture
async def apps(app_url: str) -> AsyncIterator[Sequence[App]]:
    """Two applications on one store, as in two processes, each with a worker."""
    async with AsyncExitStack() as stack:
        first, second = App(app_url, **QUICK), App(app_url, **QUICK)
        await stack.enter_async_context(first)
        if first.memory is not None:
            stack.enter_context(second.kept_at("memory:", memory=first.memory))
        await stack.enter_async_context(second)
        yield first, second


def both(apps: Sequence[App], *, shared: bool = True, recovery: float = 0.05) -> list[Breaker]:
    return [app.breaker("payments", failures=2, recovery=recovery, shared=shared) for app in apps]


async def test_what_one_worker_finds_out_spares_the_others(apps: Sequence[App]) -> None:
    mine, other = both(apps, recovery=1000)

    async with apps[0].worker(), apps[1].worker():
        await open_by(mine)
        await until(lambda: other.state == "open")

    assert other.half_open_in > 900


async def test_a_breaker_is_not_shared_unless_it_is_to_be(
    apps: Sequence[App], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, other = both(apps, shared=False)

    async def refuse(*_: object) -> None:
        raise AssertionError("the store was asked")

    for app in apps:
        monkeypatch.setattr(await app.store(), "breakers", refuse)
    async with apps[0].worker(), apps[1].worker():
        await open_by(mine)

    assert other.state == "closed"


async def test_a_worker_that_starts_follows_what_is_known(apps: Sequence[App]) -> None:
    mine, other = both(apps, recovery=1000)

    async with apps[0].worker():
        await open_by(mine)
        while not await (await apps[0].store()).breakers(["payments"]):
            await asyncio.sleep(0.005)
    async with apps[1].worker():
        await until(lambda: other.state == "open")


async def test_the_trial_of_one_worker_closes_it_for_all(apps: Sequence[App]) -> None:
    mine, other = both(apps)

    async with apps[0].worker(), apps[1].worker():
        await open_by(mine)
        await until(lambda: other.state == "half-open")
        async with asyncio.timeout(20):
            while other.state != "closed":
                try:
                    async with other:
                        pass
                except BreakerOpen:
                    await asyncio.sleep(0.01)
        await until(lambda: mine.state == "closed")


async def test_workers_together_make_no_more_trials_than_may_be(apps: Sequence[App]) -> None:
    breakers = both(apps, recovery=2)  # much longer than a trial takes, or it gives up its place
    trying = 0
    began, ends = asyncio.Event(), asyncio.Event()
    is_down = True

    async def call(breaker: Breaker) -> None:
        nonlocal trying
        while is_down:
            with suppress(BreakerOpen, Down):
                async with breaker:
                    trying += 1
                    began.set()
                    await ends.wait()
                    raise Down
            await asyncio.sleep(0.01)

    async def both_refuse() -> None:
        before = [breaker.report() for breaker in breakers]
        for breaker, then in zip(breakers, before, strict=True):
            while breaker.report().refused == then.refused:
                await asyncio.sleep(0.005)

    async with apps[0].worker(), apps[1].worker():
        await until(lambda: all(breaker.is_governed for breaker in breakers))
        await open_by(breakers[0])
        await until(lambda: breakers[1].state != "closed")
        calls = [asyncio.create_task(call(breaker)) for breaker in breakers * 5]
        for round_of_trials in (1, 2):
            await began.wait()
            await both_refuse()
            assert trying == round_of_trials
            began.clear()
            ends.set()
            await until(lambda: all(breaker.state == "open" for breaker in breakers))
            ends.clear()
        is_down = False
        ends.set()
        await asyncio.gather(*calls)


async def test_tasks_are_put_off_by_what_another_worker_found_out(apps: Sequence[App]) -> None:
    mine, other = both(apps, recovery=0.2)
    ran: list[int] = []

    @apps[1].task(breaker="payments")
    async def charge(number: int) -> None:
        ran.append(number)

    async with apps[0].worker(), apps[1].worker():
        await until(lambda: mine.is_governed and other.is_governed)
        await open_by(mine)
        await until(lambda: other.state != "closed")
        handles = [await charge.enqueue(number) for number in range(5)]
        for handle in handles:
            await handle.result(timeout=30)
        tasks = [await handle.get() for handle in handles]
        await until(lambda: mine.state == "closed" and other.state == "closed")

    assert sorted(ran) == [0, 1, 2, 3, 4]
    assert [task.attempts for task in tasks] == [1] * 5
