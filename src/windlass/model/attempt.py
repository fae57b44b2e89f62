"""What became of one attempt, as the executor returns it."""

from dataclasses import dataclass

from windlass.model.failure import ErrorClass


@dataclass(frozen=True, slots=True)
class Succeeded:
    """The handler returned."""

    result: str | None = None  # JSON


@dataclass(frozen=True, slots=True)
class Failed:
    """The handler raised, or could not be called."""

    error: str  # a JSON object: class, type, message, traceback
    error_class: ErrorClass = ErrorClass.UNKNOWN
    retry_after: float | None = None  # seconds, if the handler named them
    asked_after: float | None = None  # seconds, if the other side did, perhaps to many at once
    may_retry: bool | None = None  # what the task's own predicate said, whatever the class


@dataclass(frozen=True, slots=True)
class Snoozed:
    """The handler asked to be called again later, or the attempt was put off."""

    seconds: float
    put_off: str | None = None  # a JSON object: why, if the handler did not ask for that


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The task was to be cancelled and its handler gave way."""

    error: str


@dataclass(frozen=True, slots=True)
class Released:
    """The worker gives the task back without having run it to an end."""


AttemptOutcome = Succeeded | Failed | Snoozed | Cancelled | Released
