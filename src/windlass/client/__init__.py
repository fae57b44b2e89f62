"""What a caller may ask: enqueue, look, wait, cancel, change, retry."""

from windlass.client.asking import (
    NOT_BUILT,
    Call,
    Options,
    checked_calls,
    checked_change,
    checked_reason,
    checked_time,
    enqueue_options,
    new_task_id,
)
from windlass.client.tasks import Task, TaskSet
from windlass.client.verbs import Client, Handle

__all__ = [
    "NOT_BUILT",
    "Call",
    "Client",
    "Handle",
    "Options",
    "Task",
    "TaskSet",
    "checked_calls",
    "checked_change",
    "checked_reason",
    "checked_time",
    "enqueue_options",
    "new_task_id",
]
