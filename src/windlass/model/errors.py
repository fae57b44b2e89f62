"""Every exception Windlass raises, under one root, and those a handler raises to steer its task."""

from datetime import timedelta
from typing import Self
from uuid import UUID


class WindlassError(Exception):
    """The root of everything Windlass raises on its own account."""


class ConfigurationError(WindlassError):
    """A setting, option or command is wrong, missing or not built yet."""


class PayloadError(WindlassError):
    """Arguments or a payload that do not fit the task; nothing was written."""


class UnknownTask(WindlassError):  # noqa: N818 - the public name is fixed
    """A task type that this application does not define."""


class TaskNotFound(WindlassError):  # noqa: N818 - the public name is fixed
    """No task has this id: it never existed, or its retention is over."""

    @classmethod
    def of(cls, task_id: UUID) -> Self:
        """Return the error for a task that is nowhere."""
        return cls(f"task {task_id} is not known: it never existed, or its retention is over")


class WorkerNotFound(WindlassError):  # noqa: N818 - as its neighbour
    """No worker of this id is registered: it never was, or it has ended."""


class ScheduleNotFound(WindlassError):  # noqa: N818 - as its neighbours
    """No schedule has this name: no worker has registered it, or it was retired."""

    @classmethod
    def of(cls, name: str) -> Self:
        """Return the error for a schedule that is nowhere."""
        return cls(
            f"schedule '{name}' is not known: no worker of an application that defines it has started, "
            "or its code is gone; `windlass schedules list` shows those there are"
        )


class IdempotencyConflict(WindlassError):  # noqa: N818 - the public name is fixed
    """The idempotency key was used before with another payload; nothing was written."""

    index = 0  # of the task in the call


class TaskFailed(WindlassError):  # noqa: N818 - the public name is fixed
    """The task whose result was awaited ended in `failed` or `dead`."""

    error_class: str | None = None  # of its last error


class TaskCancelled(WindlassError):  # noqa: N818 - the public name is fixed
    """The task whose result was awaited was cancelled."""

    reason: str | None = None  # why
    by: str | None = None  # who asked for it, if anybody said


class LeaseLost(WindlassError):  # noqa: N818 - the public name is fixed
    """The claim behind this call is gone: another worker may own the task now."""


class NotAllowed(WindlassError):  # noqa: N818 - the public name is fixed
    """The caller may not do this."""


class StoreUnavailable(WindlassError):  # noqa: N818 - the public name is fixed
    """The store cannot be reached, or it is unknown whether it carried out the call."""


class StoreBusy(StoreUnavailable):
    """Somebody else holds what the call needs for longer than it may wait; nothing was done."""

    @classmethod
    def of(cls, task_id: UUID) -> Self:
        """Return the error for a task that is held."""
        return cls(
            f"task {task_id} is held by a transaction that has not ended; try again when it has"
        )


class WrongState(WindlassError):  # noqa: N818 - the public name is fixed
    """The task is not in a state in which this is possible."""


class Deadlock(WindlassError):  # noqa: N818 - says what happened
    """A handler waits for a result that cannot come: the slots are held by handlers that wait like it."""


class BreakerOpen(WindlassError):  # noqa: N818 - the public name is fixed
    """A circuit breaker did not let a call through. A handler that lets this pass is put off.

    That uses no attempt. `seconds` says when to come back: after the half-open moment, each at another time.
    """

    def __init__(self, name: str, seconds: float) -> None:
        super().__init__(name, seconds)
        self.name = name
        self.seconds = seconds

    def __str__(self) -> str:
        return f"breaker '{self.name}' lets no call through; come back in {self.seconds:.3g} s"


class NotLeader(WindlassError):  # noqa: N818 - reads as the claim it denies
    """A leader's write came with a term that is over; it changed nothing."""


class Steer(Exception):  # noqa: N818 - raised to steer a task, not to report an error
    """What a handler raises to say how its attempt ends."""


class RetryAfter(Steer):
    """Try again after so many seconds; counts as an attempt."""

    def __init__(self, seconds: float | timedelta, reason: object = "") -> None:
        super().__init__(seconds, reason)
        self.seconds = seconds
        self.reason = reason


class Snooze(Steer):
    """Come back after so many seconds; does not count as an attempt."""

    def __init__(self, seconds: float | timedelta) -> None:
        super().__init__(seconds)
        self.seconds = seconds


class Fail(Steer):
    """Fail for good, without another attempt."""

    def __init__(self, reason: object) -> None:
        super().__init__(reason)
        self.reason = reason
