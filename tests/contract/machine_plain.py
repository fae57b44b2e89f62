"""What two stores may tell differently, taken away before the store machine compares them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from windlass.model.task import Claim, ClaimedTask, QueueRecord, TaskRecord


def plain(claim: Claim | None) -> object:
    if claim is None:
        return None
    return claim.alone, [_plain_task(task) for task in claim.tasks]


def _plain_task(task: ClaimedTask) -> ClaimedTask:
    # Days and seconds that are added up as floats may differ in their last bit.
    waited = round(task.waited, 6)
    return msgspec.structs.replace(task, payload=value(task.payload), waited=waited)


def value(text: str | None) -> Any:
    return None if text is None else msgspec.json.decode(text)


def milliseconds(due_in: float | None) -> int | None:
    return None if due_in is None else round(due_in * 1000)


def without_error_times(records: Sequence[TaskRecord]) -> list[TaskRecord]:
    """PostgreSQL writes times in JSON in its own way."""
    times = {"started_at", "ended_at"}
    return [
        replace(
            record,
            errors=tuple(
                {name: value for name, value in error.items() if name not in times}
                for error in record.errors
            ),
        )
        for record in records
    ]


def without_zeros(queues: Sequence[QueueRecord]) -> list[QueueRecord]:
    return [
        replace(queue, counts={state: number for state, number in queue.counts.items() if number})
        for queue in queues
    ]
