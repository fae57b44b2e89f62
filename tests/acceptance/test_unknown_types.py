"""Tasks of types that no worker knows: they wait, or fail if that is asked for."""

from datetime import timedelta
from typing import Any

import pytest

from acceptance.quick import QUICK
from contract.postgres_clock import PostgresClock
from windlass import App, TaskFailed, TaskRecord, TaskState
from windlass.cli.letter import letter_lines

GRACE = 2.0  # seconds: a lease


def new_app(url: str, **settings: Any) -> App:
    app = App(url, **(QUICK | settings))

    @app.task
    async def known() -> str:
        return "done"

    return app


async def test_tasks_of_a_type_that_no_worker_knows_fail_after_the_grace(
    app_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = new_app(app_url, unknown_type_grace=GRACE)
    told: list[TaskRecord] = []
    app.on_dead(told.append)
    async with app, app.worker():
        waiting = await app.enqueue("lost", {"a": 1})
        later = await app.enqueue("lost", delay=3600)

        with pytest.raises(TaskFailed, match="no worker has known the type 'lost'") as raised:
            await waiting.result(30)
        record = await waiting.get()
        assert await (await app.enqueue("known")).result(10) == "done"

        assert raised.value.error_class == "code-bug"
        assert (record.status, record.attempts) == (TaskState.FAILED, 1)
        (error,) = record.errors
        assert (error["type"], error["worker_id"]) == ("UnknownTask", None)
        assert (await later.get()).status is TaskState.SCHEDULED
        (letter,) = await app.dead.list()
        assert (letter.id, letter.error_class, letter.error_type) == (
            *(waiting.id, "code-bug"),
            "UnknownTask",
        )
        shown = "\n".join(letter_lines(letter))
        assert shown.startswith("lost in queue default is failed: code-bug\n")
        assert ", by no worker\n" in shown

    assert [task.id for task in told] == [waiting.id]
    lines = [line for line in caplog.messages if line.startswith("task.unknown_type")]
    assert lines == ["task.unknown_type type=lost tasks=1 grace=2s"]


async def test_without_the_setting_they_wait(app_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    app = new_app(app_url)
    async with app:
        store = await app.store()
        monkeypatch.setattr(store, "unknown_types", None)  # whoever asks fails
        waiting = await app.enqueue("lost")
        async with app.worker():
            later = await app.enqueue("known", delay=GRACE + 1)
            assert await later.result(30) == "done"  # the leader has swept all that time

        assert (await waiting.get()).status is TaskState.PENDING


async def test_what_another_worker_knows_waits_for_it(database_url: str) -> None:
    other = App(database_url, **QUICK)

    @other.task
    async def lost() -> str:
        return "found"

    app = new_app(database_url, unknown_type_grace=GRACE)
    # The other worker knows the type, and does not get to the task.
    async with app, other, app.worker(), other.worker(queues=["elsewhere"]):
        waiting = await app.enqueue("lost")
        later = await app.enqueue("known", delay=GRACE + 1)
        assert await later.result(30) == "done"
        assert (await waiting.get()).status is TaskState.PENDING


async def test_a_failed_one_runs_once_its_worker_is_there_and_it_is_reopened(app_url: str) -> None:
    app = new_app(app_url, unknown_type_grace=GRACE)
    async with app:
        async with app.worker():
            handle = await app.enqueue("lost")
            with pytest.raises(TaskFailed):
                await handle.result(30)

        @app.task
        async def lost() -> str:
            return "found"

        await handle.retry()
        async with app.worker():
            assert await handle.result(10) == "found"


async def test_a_clock_that_jumps_ahead_costs_no_task(database_url: str) -> None:
    async with new_app(database_url, unknown_type_grace=3600) as app:
        clock = await PostgresClock.install(database_url)
        async with app.worker():
            waiting = await app.enqueue("lost")
            assert await (await app.enqueue("known", delay=1)).result(20) == "done"
            await clock.advance(timedelta(hours=2))
            assert await (await app.enqueue("known", delay=3)).result(30) == "done"
        await clock.close()

        assert (await waiting.get()).status is TaskState.PENDING
