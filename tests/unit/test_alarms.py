"""Hooks for dead tasks have their limits: in time, and in how many tasks wait for them."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from uuid import UUID

import pytest

from windlass import TaskNotFound, TaskRecord, TaskState
from windlass.model.errors import StoreUnavailable
from windlass.runtime import alarms as alarms_module
from windlass.runtime.alarms import Alarms

NOON = datetime(2027, 3, 3, 12, tzinfo=UTC)
DEADLINE = 10.0  # seconds until a test gives up
IDS = [UUID(int=number) for number in range(1, 6)]


class Records:
    """What is told of a task; some cannot be read."""

    def __init__(self, unreadable: Mapping[UUID, Exception] | None = None) -> None:
        self._unreadable = unreadable or {}
        self.silent_about: UUID | None = None

    async def get(self, task_id: UUID) -> TaskRecord:
        if task_id == self.silent_about:
            await asyncio.Event().wait()
        if task_id in self._unreadable:
            raise self._unreadable[task_id]
        return TaskRecord(
            id=str(task_id),
            type="work",
            queue="default",
            payload={},
            status=TaskState.DEAD,
            priority=10,
            created_at=NOON,
            scheduled_for=NOON,
            updated_at=NOON,
            attempts=1,
            max_attempts=1,
            generation=1,
        )


@asynccontextmanager
async def running(alarms: Alarms) -> AsyncIterator[None]:
    """Let hooks be called, and at the end wait until all are told."""
    telling = asyncio.create_task(alarms.run())
    try:
        yield
        async with asyncio.timeout(DEADLINE):
            await alarms.finish()
    finally:
        telling.cancel()
        await asyncio.wait([telling])


def events(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage().partition(" error=")[0] for one in caplog.records]


async def hang(_task: TaskRecord) -> None:
    await asyncio.Event().wait()


async def test_a_hook_that_takes_too_long_is_given_up_and_the_next_one_is_called(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(alarms_module, "CALLED_WITHIN", 0.01)
    told: list[str] = []

    async def note(task: TaskRecord) -> None:
        told.append(task.id)

    alarms = Alarms(Records(), [hang, note])

    async with running(alarms):
        alarms.tell(IDS[:2])

    assert told == [str(one) for one in IDS[:2]]
    assert events(caplog) == [f"alarm.failed task_id={one}" for one in IDS[:2]]
    assert "TimeoutError" in caplog.text


async def test_of_more_tasks_than_may_wait_nobody_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(alarms_module, "MOST_WAITING", 3)
    told: list[str] = []
    alarms = Alarms(Records(), [lambda task: told.append(task.id)])

    alarms.tell(IDS)
    async with running(alarms):
        pass

    assert told == [str(one) for one in IDS[:3]]
    assert events(caplog) == [f"alarm.skipped task_id={one}" for one in IDS[3:]]


async def test_without_hooks_nothing_waits_and_nothing_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(alarms_module, "MOST_WAITING", 3)
    alarms = Alarms(Records(), [])

    alarms.tell(IDS)

    async with asyncio.timeout(DEADLINE):
        await alarms.finish()
    assert events(caplog) == []


async def test_a_task_that_cannot_be_read_does_not_keep_the_others_from_being_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told: list[str] = []
    away = {IDS[0]: StoreUnavailable("away"), IDS[1]: TaskNotFound("gone")}
    alarms = Alarms(Records(away), [lambda task: told.append(task.id)])

    async with running(alarms):
        alarms.tell(IDS)

    assert told == [str(one) for one in IDS[2:]]
    assert events(caplog) == [f"alarm.failed task_id={one}" for one in IDS[:2]]


async def test_a_store_that_does_not_answer_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(alarms_module, "LONGEST_PATIENCE", 0.01)
    told: list[str] = []
    records = Records()
    records.silent_about = IDS[0]
    alarms = Alarms(records, [lambda task: told.append(task.id)])

    async with running(alarms):
        alarms.tell(IDS[:2])

    assert told == [str(IDS[1])]
    assert events(caplog) == [f"alarm.failed task_id={IDS[0]}"]
