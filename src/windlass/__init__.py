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
    Snooze,
    StoreUnavailable,
    TaskCancelled,
    TaskFailed,
    TaskNotFound,
    UnknownTask,
    WindlassError,
    WrongState,
)
from windlass.model.task import TaskRecord, TaskState
from windlass.policy.budget import Budget
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
    "Fail",
    "Handle",
    "IdempotencyConflict",
    "LeaseLost",
    "NotAllowed",
    "PayloadError",
    "Retry",
    "RetryAfter",
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
    "WrongState",
]
