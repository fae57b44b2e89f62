from uuid import UUID

import pytest

from windlass.model.attempt import AttemptOutcome, Cancelled, Failed, Released, Snoozed, Succeeded
from windlass.model.failure import ErrorClass
from windlass.model.task import ENDS, ClaimedTask, Outcome, TaskState
from windlass.policy.lifecycle import MOVES, settle
from windlass.policy.retry import Retry

TOKEN = UUID(int=1)
RETRY = Retry(max_attempts=4, base=2, jitter="none")


def task(attempts: int = 0, max_attempts: int = 4) -> ClaimedTask:
    return ClaimedTask(UUID(int=2), "t", "q", 10, "{}", attempts, max_attempts, 3, None)


@pytest.mark.parametrize(
    ("outcome", "attempts", "verdict", "delay"),
    [
        (Succeeded("1"), 0, Outcome.COMPLETED, 0),
        (Snoozed(7), 3, Outcome.SNOOZED, 7),
        (Released(), 3, Outcome.RELEASED, 0),
        (Cancelled("{}"), 3, Outcome.CANCELLED, 0),
        (Failed("{}"), 0, Outcome.RETRIED, 2),
        (Failed("{}"), 2, Outcome.RETRIED, 8),
        (Failed("{}", retry_after=9), 0, Outcome.RETRIED, 9),
        (Failed("{}"), 3, Outcome.DEAD, 0),
        (Failed("{}", retry_after=9), 3, Outcome.DEAD, 0),
        (Failed("{}", ErrorClass.TRANSIENT), 0, Outcome.RETRIED, 2),
        (Failed("{}", ErrorClass.RATE_LIMITED), 0, Outcome.RETRIED, 2),
        (Failed("{}", ErrorClass.RATE_LIMITED, asked_after=100), 0, Outcome.RETRIED, 100.5),
        (Failed("{}", ErrorClass.TRANSIENT, asked_after=2), 0, Outcome.RETRIED, 2.1),
        (Failed("{}", ErrorClass.PERMANENT_INPUT), 0, Outcome.FAILED, 0),
        (Failed("{}", ErrorClass.PERMANENT_INPUT, asked_after=2), 0, Outcome.FAILED, 0),
        (Failed("{}", ErrorClass.CODE_BUG), 0, Outcome.FAILED, 0),
        (Failed("{}", ErrorClass.CODE_BUG), 3, Outcome.FAILED, 0),
        (Failed("{}", ErrorClass.CODE_BUG, may_retry=True), 0, Outcome.RETRIED, 2),
        (Failed("{}", ErrorClass.CODE_BUG, may_retry=True), 3, Outcome.DEAD, 0),
        (Failed("{}", ErrorClass.TRANSIENT, may_retry=False), 0, Outcome.FAILED, 0),
    ],
)
def test_an_outcome_settles_its_task(
    outcome: AttemptOutcome, attempts: int, verdict: Outcome, delay: float
) -> None:
    settled = settle(
        TOKEN, task(attempts), outcome, retry=RETRY, draw=0.5, started_after=0.1, reported=True
    )

    assert (settled.outcome, settled.delay) == (verdict, delay)
    assert (settled.token, settled.generation, settled.reported) == (TOKEN, 3, True)


@pytest.mark.parametrize(
    ("outcome", "result", "error"),
    [
        (Succeeded("1"), "1", None),
        (Cancelled("{1}"), None, "{1}"),
        (Failed("{2}"), None, "{2}"),
        (Failed("{3}", ErrorClass.CODE_BUG), None, "{3}"),
        (Released(), None, None),
    ],
)
def test_what_came_of_an_attempt_is_written_with_its_end(
    outcome: AttemptOutcome, result: str | None, error: str | None
) -> None:
    settled = settle(
        TOKEN, task(), outcome, retry=RETRY, draw=0.5, started_after=0.1, reported=False
    )

    assert (settled.result, settled.error, settled.started_after) == (result, error, 0.1)


def test_a_retry_waits_for_the_part_that_was_drawn() -> None:
    settled = settle(
        TOKEN,
        task(1),
        Failed("{}"),
        retry=Retry(base=2),
        draw=0.25,
        started_after=0,
        reported=False,
    )

    assert settled.delay == 1.0


@pytest.mark.parametrize(
    ("outcome", "max_age"),
    [(Failed("{}"), 60.0), (Snoozed(1, "{}"), 60.0), (Snoozed(1), None), (Released(), None)],
)
def test_only_a_retry_may_be_too_old(outcome: AttemptOutcome, max_age: float | None) -> None:
    settled = settle(
        TOKEN,
        task(1),
        outcome,
        retry=Retry(max_age=60),
        draw=0.5,
        started_after=None,
        reported=False,
    )

    assert settled.max_age == max_age


def test_a_task_that_lost_attempts_to_a_lower_limit_is_dead_and_not_retried() -> None:
    settled = settle(
        TOKEN, task(5, 4), Failed("{}"), retry=RETRY, draw=0.5, started_after=None, reported=False
    )

    assert settled.outcome is Outcome.DEAD


def test_an_end_is_left_only_by_a_person_and_success_never() -> None:
    assert MOVES[TaskState.COMPLETED] == frozenset()
    for end in ENDS - {TaskState.COMPLETED}:
        assert MOVES[end] == {TaskState.PENDING, TaskState.SCHEDULED, TaskState.BLOCKED}
    assert set(MOVES) == {None, *TaskState}
