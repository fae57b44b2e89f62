"""Circuit breakers as values: their states, and how a call ended."""

from enum import Enum, StrEnum


class BreakerState(StrEnum):
    """Whether calls are let through; the values are what users and the database see."""

    CLOSED = "closed"  # they are
    OPEN = "open"  # they are not, for a while
    HALF_OPEN = "half-open"  # a few are, to find out


class CallOutcome(Enum):
    """What a protected call says of the dependency behind it."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    NO_VERDICT = "no verdict"  # cancelled, lost, or an error that does not count
