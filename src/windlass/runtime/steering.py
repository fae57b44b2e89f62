"""What a handler says by raising `Snooze`, `RetryAfter` or `Fail`, and what its task's predicate says of others."""

from windlass.failures.describe import describe, failed, text_of
from windlass.failures.facts import DEEPEST_GROUP
from windlass.model.attempt import Failed, Snoozed
from windlass.model.errors import BreakerOpen, ConfigurationError, Fail, RetryAfter, Snooze
from windlass.model.failure import ErrorClass
from windlass.registry import TaskDefinition, checked_seconds
from windlass.telemetry import emit


def steered(error: BaseException) -> Failed | Snoozed | None:
    """How an attempt ends that raised this to say so; None if it is any other exception."""
    match error:
        case Snooze() | RetryAfter() | BreakerOpen():
            return _later(error)
        case BaseExceptionGroup() if (refused := _refused_alone(error)) is not None:
            return _later(refused)
        case Fail():
            reason = getattr(error, "reason", "no reason was given")
            return failed("Fail", text_of(reason), ErrorClass.PERMANENT_INPUT)
        case _:
            return None


def _refused_alone(
    group: BaseExceptionGroup[BaseException], levels: int = DEEPEST_GROUP
) -> BreakerOpen | None:
    """The refusal that lasts longest, if the group holds nothing but calls that were not let through."""
    refusals = []
    for one in group.exceptions:
        refused: BaseException | None = one
        if isinstance(one, BaseExceptionGroup):
            refused = _refused_alone(one, levels - 1) if levels > 1 else None
        if not isinstance(refused, BreakerOpen):
            return None
        refusals.append(refused)
    return max(refusals, key=lambda one: one.seconds)


def put_off(refused: BreakerOpen, seconds: float) -> Snoozed:
    """Try again later, and use no attempt."""
    return Snoozed(seconds, describe("PutOff", f"breaker '{refused.name}' let no call through"))


def _later(error: Snooze | RetryAfter | BreakerOpen) -> Failed | Snoozed:
    kind = type(error).__name__
    try:
        seconds = checked_seconds(kind, getattr(error, "seconds", None))
    except ConfigurationError as wrong:
        return failed(kind, str(wrong), ErrorClass.CODE_BUG, error)
    if isinstance(error, BreakerOpen):
        return put_off(error, seconds)
    if isinstance(error, Snooze):
        return Snoozed(seconds)
    reason = text_of(getattr(error, "reason", "")) or f"to be retried after {seconds:g} s"
    error_class = ErrorClass.RATE_LIMITED
    return Failed(describe(kind, reason, error_class), error_class, retry_after=seconds)


def as_predicate_says(definition: TaskDefinition, error: BaseException) -> bool | None:
    """Whether the task's own predicate wants another attempt; None if there is none, or it fails."""
    when = definition.retry.when
    if when is None:
        return None
    try:
        return bool(when(error))
    except Exception as wrong:  # noqa: BLE001 - it is the application's
        emit("retry.undecided", type=definition.name, error=wrong)
        return None
