"""A claimed task on its way along the street."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from typing import Any, Protocol
from uuid import UUID

import msgspec

from windlass.breaker import ProtectedCall
from windlass.context import Context
from windlass.model.attempt import AttemptOutcome
from windlass.model.task import Claim, ClaimedTask, Fence

GIVE_WAY_WITHIN = 5.0  # seconds, for a handler that overran, was cancelled or lost its lease


class Judge(Protocol):
    """What a handler did to end its own task."""

    is_failed: bool  # it failed, whatever it may have completed

    @property
    def may_have_completed(self) -> bool:
        """Whether it may have completed its task, whatever is settled."""

    def judge(self, outcome: AttemptOutcome | None) -> AttemptOutcome | None:
        """Return what is to be settled, given what the handler did after all."""


class Halt(Enum):
    """Why a handler was asked to stop before its end."""

    LOST = "the lease is lost"  # whatever it returns is dropped
    CANCELLED = "cancelled"
    RELEASED = "the worker is shutting down"


class Awaited(msgspec.Struct, eq=False, gc=False):
    """A task whose result a handler waits for."""

    task_id: UUID
    since: float  # monotonic
    is_bounded: bool  # it will wait no longer after a while
    answer: "asyncio.Future[Any]"

    def fail(self, error: Exception) -> None:
        """Let the handler hear this instead of the result."""
        with suppress(RuntimeError):  # its event loop is closed
            self.answer.get_loop().call_soon_threadsafe(self._fail, error)

    def _fail(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


class Job(msgspec.Struct, eq=False):
    """One claimed task, from the claim to its settlement. Belongs to the worker's event loop."""

    claim: Claim
    task: ClaimedTask
    received_at: float  # monotonic, when the claim's answer arrived
    started_at: float | None = None  # monotonic
    took: float | None = None  # seconds, from the start of its handler until that returned
    is_waiting: bool = False  # for a process to run in: its handler has not begun
    reported: bool = False  # the store may have it as running
    report_confirmed: bool = False
    give_way_at: float | None = None  # monotonic, when it is or was told to end
    halt: Halt | None = None
    halt_reason: str = ""
    runner: asyncio.Task[None] | None = None
    context: Context | None = None
    awaited: list[Awaited] | None = None  # results of other tasks; few ever wait for one
    completing: Judge | None = None  # for a handler that may end its task itself
    protected: ProtectedCall | None = (
        None  # by the breaker of its type, until that was told of its end
    )

    def is_lost(self) -> bool:
        """Whether the lease is lost: whatever it returns is dropped."""
        return self.halt is Halt.LOST

    @property
    def fence(self) -> Fence:
        """What every write for this task shows."""
        return Fence(self.claim.token, self.task.id, self.task.generation)

    def overran(self, since: float = 0.0) -> bool:
        """Whether its time limit has passed, and by the monotonic clock not before `since`."""
        limit = self.give_way_at
        return self.halt is None and limit is not None and since < limit <= time.monotonic()

    @contextmanager
    def awaiting(
        self, task_id: UUID, answer: "asyncio.Future[Any]", *, is_bounded: bool
    ) -> Iterator[None]:
        """Wait for the result of another task while the block lasts. Other threads may do so."""
        awaited = Awaited(task_id, time.monotonic(), is_bounded, answer)
        if self.awaited is None:
            self.awaited = []
        self.awaited.append(awaited)
        try:
            yield
        finally:
            self.awaited.remove(awaited)

    def is_overdue(self) -> bool:
        """Whether it should have given way by now: its time is over, or it was told to end."""
        limit = self.give_way_at
        return self.runner is not None and limit is not None and limit <= time.monotonic()

    @property
    def started_after(self) -> float | None:
        """Seconds from the claim to the start, by the monotonic clock."""
        return None if self.started_at is None else self.started_at - self.received_at

    def release(self) -> None:
        """Let its time be over because the worker ends. From another thread: its own cannot hear of it."""
        self._halt(Halt.RELEASED, "")

    def stop(self, halt: Halt, reason: str = "") -> None:
        """Ask the handler to give way. A lost lease overrides every other reason."""
        self._halt(halt, reason)
        if self.context is not None:
            self.context.cancel()
        # One that has not begun looks at this by itself: cancelled, it would never run at all.
        if self.runner is not None and self.started_at is not None:
            self.runner.cancel()

    def _halt(self, halt: Halt, reason: str) -> None:
        if self.halt is None or halt is Halt.LOST:
            self.halt, self.halt_reason = halt, reason or halt.value
        if self.give_way_at is None or self.give_way_at > time.monotonic():
            self.give_way_at = time.monotonic()
