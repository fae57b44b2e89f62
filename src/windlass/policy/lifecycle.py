"""The legal moves of a task in one table, and what the outcome of an attempt means for it."""

from collections.abc import Mapping
from typing import assert_never
from uuid import UUID

from windlass.model.attempt import AttemptOutcome, Cancelled, Failed, Released, Snoozed, Succeeded
from windlass.model.task import ClaimedTask, Outcome, Settlement, TaskState
from windlass.policy.retry import Retry, delay_before

_WAITING = frozenset({TaskState.SCHEDULED, TaskState.BLOCKED, TaskState.PENDING})
_SETTLED = frozenset(
    {
        TaskState.COMPLETED,
        TaskState.SCHEDULED,
        TaskState.FAILED,
        TaskState.DEAD,
        TaskState.PENDING,
        TaskState.CANCELLED,
    }
)

MOVES: Mapping[TaskState | None, frozenset[TaskState]] = {
    None: _WAITING,
    TaskState.SCHEDULED: frozenset({TaskState.PENDING, TaskState.CANCELLED, TaskState.SCHEDULED}),
    TaskState.BLOCKED: frozenset({TaskState.PENDING, TaskState.CANCELLED}),
    TaskState.PENDING: frozenset({TaskState.CLAIMED, TaskState.CANCELLED, TaskState.SCHEDULED}),
    TaskState.CLAIMED: _SETTLED | {TaskState.RUNNING},
    TaskState.RUNNING: _SETTLED,
    TaskState.COMPLETED: frozenset(),
    TaskState.FAILED: frozenset({TaskState.PENDING}),
    TaskState.DEAD: frozenset({TaskState.PENDING}),
    TaskState.CANCELLED: frozenset({TaskState.PENDING}),
}


def completed(
    token: UUID,
    task: ClaimedTask,
    outcome: Succeeded,
    started_after: float | None,
    *,
    reported: bool,
) -> Settlement:
    """Say what the success of an attempt does to its task, in no more steps than that takes."""
    return Settlement(
        token,
        task.id,
        task.generation,
        Outcome.COMPLETED,
        started_after,
        outcome.result,
        0.0,
        None,
        reported,
    )


def settle(
    token: UUID,
    task: ClaimedTask,
    outcome: AttemptOutcome,
    *,
    retry: Retry,
    draw: float,
    started_after: float | None,
    reported: bool,
) -> Settlement:
    """Decide what the outcome of an attempt does to its task; `draw` is random in [0, 1)."""
    error: str | None = None
    delay = 0.0
    match outcome:
        case Succeeded():
            return completed(token, task, outcome, started_after, reported=reported)
        case Snoozed(delay):
            verdict = Outcome.SNOOZED
        case Released():
            verdict = Outcome.RELEASED
        case Cancelled(error):
            verdict = Outcome.CANCELLED
        case Failed(error, permanent=True):
            verdict = Outcome.FAILED
        case Failed(error) if task.attempts + 1 >= task.max_attempts:
            verdict = Outcome.DEAD
        case Failed(error, retry_after=seconds):
            verdict = Outcome.RETRIED
            delay = delay_before(retry, task.attempts + 1, draw) if seconds is None else seconds
        case _:
            assert_never(outcome)
    return Settlement(
        token, task.id, task.generation, verdict, started_after, None, delay, error, reported
    )
