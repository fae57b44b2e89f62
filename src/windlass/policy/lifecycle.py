"""The legal moves of a task in one table, and what the outcome of an attempt means for it."""

from collections.abc import Mapping
from typing import assert_never
from uuid import UUID

from windlass.model.attempt import AttemptOutcome, Cancelled, Failed, Released, Snoozed, Succeeded
from windlass.model.failure import ErrorClass
from windlass.model.task import ClaimedTask, Outcome, Settlement, TaskState
from windlass.policy.classification import RETRIED
from windlass.policy.retry import Retry, age_limit, delay_as_asked, delay_before

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
_REOPENED = _WAITING  # at once, unless it has to pass a gate

MOVES: Mapping[TaskState | None, frozenset[TaskState]] = {
    None: _WAITING,
    TaskState.SCHEDULED: _WAITING | {TaskState.CANCELLED, TaskState.DEAD},
    TaskState.BLOCKED: _WAITING | {TaskState.CANCELLED},
    TaskState.PENDING: frozenset(
        {
            TaskState.CLAIMED,
            TaskState.CANCELLED,
            TaskState.SCHEDULED,
            TaskState.BLOCKED,  # somebody else came first through its gate
            TaskState.FAILED,
            TaskState.DEAD,
        }
    ),
    TaskState.CLAIMED: _SETTLED | {TaskState.RUNNING},
    TaskState.RUNNING: _SETTLED,
    TaskState.COMPLETED: frozenset(),
    TaskState.FAILED: _REOPENED,
    TaskState.DEAD: _REOPENED,
    TaskState.CANCELLED: _REOPENED,
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
    error_class: ErrorClass | None = None
    delay = 0.0
    match outcome:
        case Succeeded():
            return completed(token, task, outcome, started_after, reported=reported)
        case Snoozed(delay, error):
            verdict = Outcome.SNOOZED
        case Released():
            verdict = Outcome.RELEASED
        case Cancelled(error):
            verdict = Outcome.CANCELLED
        case Failed(error, error_class) if not _is_retried(outcome):
            verdict = Outcome.FAILED
        case Failed(error, error_class) if task.attempts + 1 >= task.max_attempts:
            verdict = Outcome.DEAD
        case Failed(error, error_class):
            verdict = Outcome.RETRIED
            delay = _delay(outcome, retry, task.attempts + 1, draw)
        case _:
            assert_never(outcome)
    # What was put off is no attempt, but a retry may be too old by then.
    is_retry = verdict is Outcome.RETRIED or (
        verdict is Outcome.SNOOZED and error is not None and task.attempts > 0
    )
    return Settlement(
        token,
        task.id,
        task.generation,
        verdict,
        started_after,
        None,
        delay,
        error,
        reported,
        error_class,
        age_limit(retry) if is_retry else None,
    )


def _delay(failed: Failed, retry: Retry, attempt: int, draw: float) -> float:
    """Seconds until the next attempt: as the handler says, as the other side does, or as configured."""
    if failed.retry_after is not None:
        return failed.retry_after
    if failed.asked_after is not None:
        return delay_as_asked(failed.asked_after, draw)
    return delay_before(retry, attempt, draw)


def _is_retried(failed: Failed) -> bool:
    """Whether another attempt is worth while: as the task says, or else as the class of the error does."""
    return failed.error_class in RETRIED if failed.may_retry is None else failed.may_retry
