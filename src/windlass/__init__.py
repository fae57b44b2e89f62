"""Windlass: a task orchestrator for Python that needs nothing but PostgreSQL."""

from windlass.app import App
from windlass.breaker import Breaker
from windlass.client import Call, Handle, Task, TaskSet
from windlass.context import Context
from windlass.model.dead import DeadLetter
from windlass.model.errors import (
    BreakerOpen,
    ConfigurationError,
    Deadlock,
    Fail,
    IdempotencyConflict,
    LeaseLost,
    NotAllowed,
    PayloadError,
    RetryAfter,
    ScheduleNotFound,
    Snooze,
    StoreUnavailable,
    TaskCancelled,
    TaskFailed,
    TaskNotFound,
    UnknownTask,
    WindlassError,
    WorkerNotFound,
    WrongState,
)
from windlass.model.explanation import Explanation
from windlass.model.schedule import ScheduleRecord
from windlass.model.task import TaskRecord, TaskState
from windlass.policy.budget import Budget
from windlass.policy.limit import Limit
from windlass.policy.retry import Retry

__all__ = [
    "App",
    "Breaker",
    "BreakerOpen",
    "Budget",
    "Call",
    "ConfigurationError",
    "Context",
    "DeadLetter",
    "Deadlock",
    "Explanation",
    "Fail",
    "Handle",
    "IdempotencyConflict",
    "LeaseLost",
    "Limit",
    "NotAllowed",
    "PayloadError",
    "Retry",
    "RetryAfter",
    "ScheduleNotFound",
    "ScheduleRecord",
    "Snooze",
    "StoreUnavailable",
    "Task",
    "TaskCancelled",
    "TaskFailed",
    "TaskNotFound",
    "TaskRecord",
    "TaskSet",
    "TaskState",
    "UnknownTask",
    "WindlassError",
    "WorkerNotFound",
    "WrongState",
]
