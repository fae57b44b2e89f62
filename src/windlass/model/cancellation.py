"""Why a task was cancelled and who asked for it, in one text: nothing else is passed on or kept of either.

So workers and SQL of any version carry both, and whoever looks at a task reads both.
"""

from typing import NamedTuple, Self

_ASKED = "(asked for by "


class Cancellation(NamedTuple):
    """A wish to cancel."""

    reason: str
    by: str | None = None  # nobody said

    @property
    def text(self) -> str:
        """Both, as it is kept."""
        if self.by is None:
            return self.reason
        return f"{self.reason and self.reason + ' '}{_ASKED}{self.by})"

    @classmethod
    def read(cls, text: str) -> Self:
        """Return what a text says of both."""
        reason, _, named = text.rpartition(_ASKED)
        by = named.removesuffix(")")
        read = cls(reason.removesuffix(" "), by)
        return read if by and read.text == text else cls(text)


def cancelled_by(status: str, last_error: str | None) -> str | None:
    """Who asked for the cancellation that a task ended with, if it did and anybody said."""
    return Cancellation.read(last_error).by if status == "cancelled" and last_error else None


def may_be_by(name: str) -> bool:
    """Whether a text that names this one can be read again."""
    return _ASKED not in name
