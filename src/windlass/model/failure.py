"""What kind of error it was, and what an exception says of itself."""

from enum import StrEnum

import msgspec

Plain = str | int | float | bool | None  # what a rule can compare with


class ErrorClass(StrEnum):
    """What an error means for its task; the values are what users and the database see."""

    TRANSIENT = "transient"  # tried again as configured
    RATE_LIMITED = "rate-limited"  # tried again when the other side says so
    PERMANENT_INPUT = "permanent-input"  # fails at once: no attempt can succeed
    CODE_BUG = "code-bug"  # fails at once, and somebody should know
    UNKNOWN = "unknown"  # tried again as configured, and shown: a rule is missing


class ErrorFacts(msgspec.Struct, frozen=True, kw_only=True):
    """An exception as plain values, which can cross from one process into another."""

    names: frozenset[str] = frozenset()  # by which its class and the bases of that go
    message: str = ""
    status: int | None = None  # of HTTP
    sqlstate: str | None = None
    attributes: dict[str, Plain] = {}  # by path, those that some rule looks at
    retry_after: float | None = None  # seconds, as the other side said
    members: tuple["ErrorFacts", ...] = ()  # of an exception group
