"""Cancelling many tasks by filter from an application."""

import asyncio
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest

from acceptance.quick import QUICK
from windlass import App, ConfigurationError, Handle, TaskCancelled, TaskState
from windlass.client import CancelReport, cancelling, finding
from windlass.model.errors import StoreBusy
from windlass.model.task import CancelAnswer, ClaimRequest, TaskFilter, TaskPage

HOUR = timedelta(hours=1)


def ids(handles: Sequence[Handle]) -> list[str]:
    return sorted(handle.id for handle in handles)


async def statuses(handles: Sequence[Handle]) -> list[TaskState]:
    return [(await handle.get()).status for handle in handles]


@pytest.mark.parametrize(
    "filters",
    [
        {"type": "work"},
        {"queue": "bulk"},
        {"tag": "night"},
        {"type": "work", "queue": "bulk", "tag": "night", "status": "pending"},
        {"status": ["pending"], "created_from": datetime.now(UTC) - HOUR, "tag": "night"},
        {"type": "work", "created_until": datetime.now(UTC) + HOUR},
    ],
)
async def test_the_tasks_of_a_filter_are_cancelled_and_no_others(
    app: App, filters: dict[str, Any]
) -> None:
    work = await app.enqueue("work", queue="bulk", tags=["night"])
    other = await app.enqueue("other", tags=["day"])

    foreseen = await app.cancel_tasks("enough", by="ops", dry_run=True, **filters)
    assert await statuses([work, other]) == ["pending", "pending"]
    report = await app.cancel_tasks("enough", by="ops", **filters)

    assert report == foreseen == CancelReport(cancelled=[work.id])
    assert await statuses([work, other]) == ["cancelled", "pending"]
    record = await work.get()
    assert (record.last_error, record.cancelled_by) == ("enough (asked for by ops)", "ops")
    assert await app.cancel_tasks("enough", by="ops", **filters) == CancelReport()


async def test_waiting_tasks_end_at_once_and_workers_are_asked_for_the_others(app: App) -> None:
    @app.task
    async def endless() -> None:
        await asyncio.Event().wait()

    later = await endless.options(delay=3600).enqueue()
    async with app.worker(concurrency=1):
        running = await endless.enqueue()
        while (await running.get()).status is not TaskState.RUNNING:
            await asyncio.sleep(0.05)

        foreseen = await app.cancel_tasks(type="endless", dry_run=True)
        report = await app.cancel_tasks("enough", by="ops", type="endless")

        assert report == foreseen
        assert (report.cancelled, report.requested) == ([later.id], [running.id])
        with pytest.raises(TaskCancelled) as raised:
            await running.result(20)
    assert (raised.value.reason, raised.value.by) == ("enough", "ops")


async def test_a_state_that_is_named_is_taken_at_its_word(app: App) -> None:
    ended = await app.enqueue("work")
    await ended.cancel("first")
    waiting = await app.enqueue("work")

    report = await app.cancel_tasks(type="work", status="cancelled")

    assert report == CancelReport(ended=[ended.id])
    assert await statuses([ended, waiting]) == ["cancelled", "pending"]
    assert (await ended.get()).last_error == "first"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "no filter was given.*everything=True"),
        ({"type": None, "status": None}, "no filter was given"),
        ({"type": "work", "status": []}, r"status \[\]: use one of"),
        ({"everything": True, "type": "work"}, "everything=True excludes a filter"),
        ({"everything": "yes"}, "everything 'yes' must be True or False"),
        ({"type": "work", "dry_run": "no"}, "dry_run 'no' must be True or False"),
        ({"type": ""}, "type '' has 0 characters"),
        ({"queue": "a\nb"}, "queue .* control character"),
        ({"tag": 5}, "tag 5 must be a string"),
        ({"status": "lost"}, "status 'lost': use one of scheduled, .*, cancelled"),
        ({"status": 5}, "status 5: use one of"),
        ({"created_from": datetime(2030, 1, 1)}, "created_from .* no time zone"),  # noqa: DTZ001 - on purpose
        ({"type": "work", "kind": "x"}, "filter 'kind' is not known; filters are: type, queue"),
        ({"type": "work", "by": ""}, "by '' has 0 characters"),
        ({"type": "work", "reason": 5}, "reason 5 must be a string"),
    ],
)
async def test_what_is_not_clear_is_refused_and_cancels_nothing(
    app: App, given: dict[str, Any], said: str
) -> None:
    handle = await app.enqueue("work")

    with pytest.raises(ConfigurationError, match=said):
        await app.cancel_tasks(**given)

    assert await statuses([handle]) == ["pending"]


async def test_everything_is_cancelled_if_that_is_said(app: App) -> None:
    handles = [await app.enqueue(name) for name in ("a", "b")]

    report = await app.cancel_tasks(everything=True)

    assert sorted(report.cancelled) == ids(handles)
    assert await statuses(handles) == ["cancelled", "cancelled"]


async def test_tasks_are_found_in_pages_of_a_bounded_size(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finding, "PAGE", 5)
    store = await app.store()
    read, limits = store.tasks, []

    async def tasks(wanted: TaskFilter) -> TaskPage:
        limits.append(wanted.limit)
        return await read(wanted)

    monkeypatch.setattr(store, "tasks", tasks)
    handles = [await app.enqueue("work") for _ in range(12)]

    report = await app.cancel_tasks(type="work")

    assert sorted(report.cancelled) == ids(handles)
    assert set(limits) == {5}


async def test_many_are_cancelled_in_batches_and_told_of_in_their_order(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cancelling, "BATCH", 5)
    store = await app.store()
    cancel, sizes = store.cancel_many, []

    async def cancel_many(task_ids: Sequence[uuid.UUID], reason: str) -> list[CancelAnswer]:
        sizes.append(len(task_ids))
        return await cancel(task_ids, reason)

    monkeypatch.setattr(store, "cancel_many", cancel_many)
    handles = [await app.enqueue("work") for _ in range(12)]

    report = await app.cancel_tasks(type="work")

    assert report.cancelled == ids(handles)[::-1]
    assert sizes == [5, 5, 2]


async def test_tasks_that_are_held_keep_no_others_and_are_waited_for_together(
    database_url: str, sql_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cancelling, "HELD_WITHIN", 0.5)
    monkeypatch.setattr(cancelling, "BATCH", 3)
    async with App(database_url) as app:
        handles = [await app.enqueue("work") for _ in range(20)]
        held, others = handles[::2], handles[1::2]
        connection = await asyncpg.connect(sql_url)
        async with connection.transaction():
            await connection.execute(
                "SELECT FROM windlass.ready WHERE task_id = ANY ($1) FOR UPDATE", ids(held)
            )

            async with asyncio.timeout(4.0):  # and not half a second for each
                report = await app.cancel_tasks(type="work")
        await connection.close()
        again = await app.cancel_tasks(type="work")

    assert sorted(report.cancelled) == ids(others)
    assert sorted(report.refused) == ids(held)
    for task_id, error in report.refused.items():
        assert isinstance(error, StoreBusy)
        assert str(error).startswith(f"task {task_id} is held by a transaction")
    assert sorted(again.cancelled) == ids(held)


async def test_a_task_that_is_let_go_in_time_is_cancelled(database_url: str, sql_url: str) -> None:
    async with App(database_url) as app:
        handle = await app.enqueue("work")
        connection = await asyncpg.connect(sql_url)
        holding = connection.transaction()
        await holding.start()
        await connection.execute("SELECT FROM windlass.ready FOR UPDATE")

        cancelling_it = asyncio.create_task(app.cancel_tasks(type="work"))
        await asyncio.sleep(0.5)
        assert not cancelling_it.done()
        await holding.rollback()

        assert await cancelling_it == CancelReport(cancelled=[handle.id])
        await connection.close()


async def test_a_table_that_is_held_for_a_moment_refuses_nothing(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = await app.enqueue("work")
    store = await app.store()
    cancel, busy = store.cancel_many, [StoreBusy("somebody holds a table")]

    async def cancel_many(task_ids: Sequence[uuid.UUID], reason: str) -> list[CancelAnswer]:
        if busy:
            raise busy.pop()
        return await cancel(task_ids, reason)

    monkeypatch.setattr(store, "cancel_many", cancel_many)

    assert await app.cancel_tasks(type="work") == CancelReport(cancelled=[handle.id])


async def test_a_filter_finds_every_task_though_some_move_between_two_pages(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finding, "PAGE", 5)
    async with App(database_url) as app:
        store = await app.store()
        enqueued = [await app.enqueue("work") for _ in range(20)]
        pages = 0
        read = store.tasks

        async def tasks(wanted: TaskFilter) -> TaskPage:
            nonlocal pages
            pages += 1
            if pages == 2:  # the place of what workers hold was read before, and was empty
                await store.claim(
                    ClaimRequest(uuid.uuid4(), ("work",), 8, timedelta(30), timedelta(1), None)
                )
            return await read(wanted)

        monkeypatch.setattr(store, "tasks", tasks)
        report = await app.cancel_tasks(type="work")

    assert sorted(report.cancelled + report.requested) == ids(enqueued)


def test_synchronous_code_cancels_by_filter_too(app_url: str) -> None:
    with App(app_url, **QUICK) as app:
        handle = app.enqueue_sync("work", tags=["night"])

        report = app.cancel_tasks_sync("enough", tag="night", by="ops")

        assert report.cancelled == [handle.id]
        assert handle.get_sync().cancelled_by == "ops"
