"""What a caller may ask: enqueue, look, wait, cancel, change, retry, replay."""

from windlass.client.asking import (
    Call,
    Options,
    checked_calls,
    checked_cancellation,
    checked_change,
    checked_reason,
    checked_time,
    enqueue_options,
    new_task_id,
    new_task_ids,
)
from windlass.client.bulk import CHANGES, RETRIES, Answers, Chosen
from windlass.client.cancelling import CANCELS, CancelOptions, CancelReport
from windlass.client.dead import (
    DeadFilters,
    DeadLetters,
    DiscardReport,
    checked_id,
    dead_filter,
    replay_rule,
)
from windlass.client.finding import TaskFilters, task_filter
from windlass.client.replaying import ReplayPlan, ReplayReport, checked_plan
from windlass.client.rules import LimitOptions, QueueOptions, Queues, Types, lane_rule
from windlass.client.schedules import Schedules, checked_schedule
from windlass.client.tasks import Task, TaskSet
from windlass.client.values import ValueOptions, Values, checked_value, value_rule
from windlass.client.verbs import Client, Handle
from windlass.client.workers import Workers

__all__ = [
    "CANCELS",
    "CHANGES",
    "RETRIES",
    "Answers",
    "Call",
    "CancelOptions",
    "CancelReport",
    "Chosen",
    "Client",
    "DeadFilters",
    "DeadLetters",
    "DiscardReport",
    "Handle",
    "LimitOptions",
    "Options",
    "QueueOptions",
    "Queues",
    "ReplayPlan",
    "ReplayReport",
    "Schedules",
    "Task",
    "TaskFilters",
    "TaskSet",
    "Types",
    "ValueOptions",
    "Values",
    "Workers",
    "checked_calls",
    "checked_cancellation",
    "checked_change",
    "checked_id",
    "checked_plan",
    "checked_reason",
    "checked_schedule",
    "checked_time",
    "checked_value",
    "dead_filter",
    "enqueue_options",
    "lane_rule",
    "new_task_id",
    "new_task_ids",
    "replay_rule",
    "task_filter",
    "value_rule",
]
