"""Many tasks by their fields: read as a list of them is, and made no sooner than they are read."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest

from windlass import App
from windlass.client.asking import Call, distinct_options
from windlass.model.task import NewTask
from windlass.store.port import NewTasks, TaskColumns

AT = datetime(2026, 1, 1, tzinfo=UTC)
TASKS = [
    NewTask(UUID(int=1), "resize", "{}"),
    NewTask(UUID(int=2), "mail", '{"a": 1}', "bulk", 3, 5, 1.5, None, "key", ("a", "b")),
    NewTask(UUID(int=3), "mail", "{}", at=AT, retention=timedelta(days=1)),
    NewTask(UUID(int=4), "resize", "{}"),
]


def lazily(tasks: Sequence[NewTask]) -> NewTasks:
    return NewTasks(len(tasks), lambda first, last: tasks[first:last])


@pytest.mark.parametrize("asked", [TaskColumns.of, lazily])
def test_tasks_by_their_fields_are_read_as_a_list_of_them(asked: type[TaskColumns]) -> None:
    for tasks in ([], TASKS[:1], TASKS):
        assert list(asked(tasks)) == tasks
        assert len(asked(tasks)) == len(tasks)
        assert [*zip(*asked(tasks).columns, strict=True)] == tasks
    assert asked(TASKS)[2] == asked(TASKS)[-2] == TASKS[2]
    assert list(asked(TASKS)[1:3]) == list(asked(TASKS)[-3:-1]) == TASKS[1:3]
    assert list(asked(TASKS)[::2]) == TASKS[::2]
    assert list(asked(TASKS)[::-1]) == TASKS[::-1]
    with pytest.raises(IndexError):
        asked(TASKS)[4]


def test_tasks_are_made_as_far_as_they_are_read_and_once() -> None:
    made: list[tuple[int, int]] = []

    def make(first: int, last: int) -> Sequence[NewTask]:
        made.append((first, last))
        return TASKS[first:last]

    tasks = NewTasks(len(TASKS), make)

    assert (len(tasks), made) == (4, [])
    assert list(tasks[:2]) == TASKS[:2]
    assert made == [(0, 2)]
    assert tasks[0] == TASKS[0]
    assert list(tasks[2:2]) == []
    assert made == [(0, 2)]
    assert tasks[2] == TASKS[2]
    assert made == [(0, 2), (2, 3)]
    assert tasks.columns[0] == [task.id for task in tasks] == [task.id for task in TASKS]
    assert made == [(0, 2), (2, 3), (3, 4)]


async def test_tasks_with_keys_are_all_made_before_any_is_written() -> None:
    async with App("memory:") as app:

        @app.task
        async def work(n: int) -> None: ...

        client = await app.client()
        calls = [work.call(n) for n in range(2000)]
        keyed = work.options(idempotency_key="a").call(0)

        def made(calls: list[Call]) -> Sequence[NewTask]:
            return client._new_tasks(calls, distinct_options(calls), None)

        assert isinstance(made(calls), NewTasks)
        assert not isinstance(made([*calls, keyed]), NewTasks)
