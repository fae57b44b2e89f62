"""What a user may enqueue, from outside and from a handler."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest

from acceptance.quick import QUICK
from windlass import App, IdempotencyConflict, PayloadError, TaskState
from windlass.client import Handle
from windlass.model.task import Enqueued, NewTask
from windlass.telemetry import unwatch, watch


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


@pytest.fixture
async def sql(sql_url: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(sql_url)
    yield connection
    await connection.close()


TRANSACTIONS = "SELECT count(DISTINCT x) FROM windlass.ready"
REFUSE = """
CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'this one is refused' USING ERRCODE = 'WL005';
END
$$;
CREATE TRIGGER refuse BEFORE INSERT ON windlass.task FOR EACH ROW
WHEN (NEW.payload = '{"n": 50}') EXECUTE FUNCTION public.refuse();
"""


async def test_tasks_that_are_enqueued_at_the_same_time_share_transactions(
    database_url: str, sql: asyncpg.Connection
) -> None:
    told: list[int] = []

    def count(event: str, batch: Any) -> None:
        if event == "enqueued":
            told.extend(json.loads(task.payload)["n"] for task in batch.tasks)

    app = App(database_url, **QUICK)

    @app.task
    async def work(n: int) -> None: ...

    @app.task
    async def other(n: int) -> None: ...

    watch(count)
    async with app:
        calls = [(work, other)[n % 10 == 0].enqueue(n) for n in range(100)]
        handles = await asyncio.gather(*calls)
        records = await asyncio.gather(*(handle.get() for handle in handles))
    unwatch(count)

    assert [record.payload["n"] for record in records] == list(range(100))
    assert {record.type for record in records if record.payload["n"] % 10 == 0} == {"other"}
    assert await sql.fetchval(TRANSACTIONS) <= 5
    assert sorted(told) == list(range(100))


async def test_tasks_that_are_enqueued_from_threads_at_the_same_time_are_all_there(
    database_url: str, sql: asyncpg.Connection
) -> None:
    app = App(database_url, **QUICK)

    @app.task
    async def work(n: int) -> None: ...

    def enqueue(n: int) -> bool:
        ready.wait()
        return work.enqueue_sync(n).created

    ready = threading.Barrier(20)
    with ThreadPoolExecutor(20) as threads:
        created = await asyncio.to_thread(lambda: list(threads.map(enqueue, range(20))))
    await asyncio.to_thread(app.close_sync)

    assert created == [True] * 20
    assert await sql.fetchval("SELECT count(*) FROM windlass.ready") == 20


async def test_one_that_the_database_refuses_fails_alone(
    database_url: str, sql: asyncpg.Connection
) -> None:
    await sql.execute(REFUSE)
    app = App(database_url, **QUICK)

    @app.task
    async def work(n: int) -> None: ...

    async with app:
        calls = [work.enqueue(n) for n in range(100)]
        answers = await asyncio.gather(*calls, return_exceptions=True)

    refused = answers.pop(50)
    assert isinstance(refused, PayloadError)
    assert str(refused) == "this one is refused"
    assert all(isinstance(answer, Handle) for answer in answers)
    assert await sql.fetchval("SELECT count(*) FROM windlass.task") == 99


async def test_a_conflict_of_one_is_none_of_the_others(app: App) -> None:
    @app.task
    async def pay(order: int) -> None: ...

    keyed = pay.options(idempotency_key="o-1")
    await keyed.enqueue(1)

    calls = [pay.enqueue(n) for n in range(10)]
    *answers, conflict = await asyncio.gather(*calls, keyed.enqueue(2), return_exceptions=True)

    assert isinstance(conflict, IdempotencyConflict)
    assert all(isinstance(answer, Handle) for answer in answers)


async def test_tasks_with_keys_are_written_each_for_itself(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, sizes = await app.store(), []
    enqueue = store.enqueue

    async def counted(tasks: Sequence[NewTask], **options: Any) -> list[Enqueued]:
        sizes.append(len(tasks))
        return await enqueue(tasks, **options)

    monkeypatch.setattr(store, "enqueue", counted)

    @app.task
    async def pay(order: int) -> None: ...

    await asyncio.gather(*(pay.options(idempotency_key=f"o-{n}").enqueue(n) for n in range(10)))

    assert sizes == [1] * 10


async def test_an_app_that_is_closed_answers_what_is_under_way(app: App) -> None:
    @app.task
    async def work(n: int) -> None: ...

    calls = [asyncio.create_task(work.enqueue(n)) for n in range(50)]
    while not any(call.done() for call in calls):
        await asyncio.sleep(0)
    await app.close()

    answers = await asyncio.gather(*calls)
    assert len({handle.id for handle in answers}) == 50
    for handle in answers:
        assert (await handle.get()).status is TaskState.PENDING


async def test_a_bad_item_of_a_large_call_is_named_and_nothing_is_written(app: App) -> None:
    """Its first tasks are written while the others are made."""

    @app.task
    async def resize(width: int) -> None: ...

    calls = [resize.call(width) for width in range(2500)]
    calls[2345] = resize.call("wide")  # type: ignore[arg-type]  # on purpose

    with pytest.raises(PayloadError, match=r"^item 2345: task 'resize': .*width"):
        await app.enqueue_many(calls)

    assert await (await app.store()).queues() == []
    del calls[2345]
    handles = await app.enqueue_many(calls)
    assert (await handles[2345].get()).payload == {"width": 2346}


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


@pytest.mark.parametrize("number", [10, 300])
async def test_each_of_many_calls_is_of_its_own_type_and_options(number: int) -> None:
    app = App("memory:")

    @app.task(queue="mail", priority="high", retry=7)
    async def send(value: str) -> None: ...

    @app.task(queue="images", priority="low", retry=2)
    async def resize(value: int) -> None: ...

    loud = resize.options(priority="critical")
    calls = [
        call
        for n in range(number)
        for call in (send.call(str(n)), resize.call(n), loud.call(n), send.call(str(n)))
    ]
    async with app:
        records = [await handle.get() for handle in await app.enqueue_many(calls)]
        with pytest.raises(PayloadError, match=f"item {len(calls) + 1}: "):
            await app.enqueue_many([*calls, send.call("x"), resize.call("x")])  # type: ignore[arg-type]

    asked = [(one.type, one.queue, one.priority, one.max_attempts) for one in records]
    kinds = [("send", "mail", 20, 7), ("resize", "images", 0, 2), ("resize", "images", 30, 2)]
    assert asked == [*kinds, kinds[0]] * number
    values = [one.payload["value"] for one in records]
    assert values == [value for n in range(number) for value in (str(n), n, n, str(n))]
