"""What a user may enqueue, from outside and from a handler."""

from datetime import UTC, datetime, timedelta

import pytest

from acceptance.quick import QUICK
from windlass import App, IdempotencyConflict, PayloadError, TaskState


async def test_a_time_in_the_past_means_now(app: App) -> None:
    @app.task
    async def tick() -> None: ...

    handle = await tick.options(at=datetime.now(UTC) - timedelta(days=1)).enqueue()

    assert (await handle.get()).status is TaskState.PENDING


async def test_enqueue_by_name_uses_the_defaults_that_a_worker_registered(app: App) -> None:
    @app.task(name="mail.send", queue="mail", priority="high", retry=7)
    async def send(to: str) -> str:
        return to

    await app.run_worker(until_idle=True)
    producer = App(app.url, **QUICK)
    if app.url == "memory:":
        producer = app
    async with producer:
        handle = await producer.enqueue("mail.send", {"to": "a@example.com"})
        record = await handle.get()

    assert (record.queue, record.priority, record.max_attempts) == ("mail", 20, 7)


async def test_the_same_key_gives_the_first_task(app: App) -> None:
    @app.task
    async def pay(order: int) -> None: ...

    first = await pay.options(idempotency_key="o-1").enqueue(1)
    second = await pay.options(idempotency_key="o-1").enqueue(1)

    assert (second.id, first.created, second.created) == (first.id, True, False)
    with pytest.raises(IdempotencyConflict, match="o-1"):
        await pay.options(idempotency_key="o-1").enqueue(2)


async def test_a_bad_item_among_many_is_named_and_nothing_is_written(app: App) -> None:
    @app.task
    async def resize(width: int) -> None: ...

    calls = [resize.call(1), resize.call("wide"), resize.call(3)]  # type: ignore[arg-type]  # on purpose

    with pytest.raises(PayloadError, match="item 1"):
        await app.enqueue_many(calls)

    with pytest.raises(PayloadError, match=r"^task 'resize'"):
        await app.enqueue_many(calls[1:2])
    with pytest.raises(PayloadError, match=r"^task 'resize'"):
        await app.enqueue("resize", {"width": "wide"})
    assert await (await app.store()).queues() == []


async def test_a_conflict_among_many_is_named_and_nothing_is_written(app: App) -> None:
    @app.task
    async def pay(order: int) -> None: ...

    keyed = pay.options(idempotency_key="o-1")
    first = await keyed.enqueue(1)

    with pytest.raises(IdempotencyConflict, match=r"item 2: .*o-1"):
        await app.enqueue_many([pay.call(7), keyed.call(1), keyed.call(2)])

    (queue,) = await (await app.store()).queues()
    assert queue.counts == {TaskState.PENDING: 1}
    assert (await first.get()).payload == {"order": 1}


async def test_a_handler_may_enqueue_and_its_fence_goes_with_it(app: App) -> None:
    @app.task
    async def child() -> str:
        return "child"

    @app.task
    async def parent() -> str:
        return (await child.enqueue()).id

    handle = await parent.enqueue()
    await app.run_worker(until_idle=True)

    assert await app.handle(await handle.result(5)).result(5) == "child"


async def test_a_handler_enqueues_on_another_app_without_its_fence(app: App) -> None:
    other = App("memory:")

    @other.task
    async def elsewhere() -> None: ...

    @app.task(retry=1)
    async def work() -> str:
        async with other:
            return (await elsewhere.enqueue()).id

    handle = await work.enqueue()
    await app.run_worker(until_idle=True)

    assert await handle.result(5)
