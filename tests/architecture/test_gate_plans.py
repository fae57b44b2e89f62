"""What is read to let tasks through gates depends on how many they are, not on what the planner took the tables for."""

import pytest

from architecture.plan_costs import Subject, new_tasks, settlements
from windlass.model.task import Answer, NewTask, Outcome

pytestmark = pytest.mark.slow  # many rows, to guard what only another statement can change
MANY = 3000
BATCH = 500


def gated(kind: str, number: int) -> list[NewTask]:
    """Tasks each of which has a gate of its own."""
    tasks = new_tasks(number)
    if kind == "key":
        return [task._replace(ordering_key=f"key {task.id}") for task in tasks]
    by = '[["tenant", null]]'
    return [one._replace(payload=f'{{"tenant": "{one.id}"}}', limit_by=by) for one in tasks]


async def add(subject: Subject, tasks: list[NewTask]) -> None:
    for first in range(0, len(tasks), BATCH):
        await subject.store.enqueue(tasks[first : first + BATCH])


@pytest.mark.parametrize("kind", ["key", "value"])
async def test_gates_analysed_while_there_were_none_are_not_read_whole(
    subject: Subject, kind: str
) -> None:
    await add(subject, gated(kind, BATCH))
    held = await subject.claim()
    await subject.store.settle(settlements(held, Outcome.COMPLETED))
    await subject.connection.execute("VACUUM ANALYZE")  # taken for empty tables from here on
    await add(subject, gated(kind, MANY))
    subject.start_measuring()

    held = await subject.claim(BATCH)
    claimed = {table: subject.rows(table) for table in ("gate", "gate_entry", "task_gate", "task")}
    while await subject.store.open_gates(BATCH):
        pass  # so that there are many gates
    subject.probe.costs.clear()
    answers = await subject.store.settle(settlements(held, Outcome.COMPLETED))
    settled = {table: subject.rows(table) for table in ("gate", "gate_entry", "task_gate", "task")}

    assert set(answers) == {Answer.APPLIED}
    assert max(claimed.values()) <= 8 * BATCH
    assert max(settled.values()) <= 8 * BATCH
