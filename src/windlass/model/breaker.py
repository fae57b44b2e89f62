"""Circuit breakers as values: their states, how a call ended, and what a store keeps of one."""

from enum import Enum, StrEnum
from typing import NamedTuple


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


class Trials(Enum):
    """Who makes the trials of a half-open circuit, if processes share it."""

    OURS = "this process"
    THEIRS = "another one"
    UNDECIDED = "nobody as yet: the store is to be asked"


class SharedBreaker(NamedTuple):
    """What a store knows of a breaker that workers share. One that never opened is closed, at epoch 0."""

    name: str
    epoch: int  # grows whenever it opens or closes: fences what is written about it
    open_for: float | None  # seconds until the half-open moment, 0 after it; None: it is closed
