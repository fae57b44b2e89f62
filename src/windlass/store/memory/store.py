"""The store inside this process: the executable specification that every other adapter follows."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from uuid import UUID

from windlass.store.memory.breaking import BreakerVerbs
from windlass.store.memory.claiming import ClaimVerbs
from windlass.store.memory.completing import CompleteVerbs
from windlass.store.memory.dead import DeadVerbs
from windlass.store.memory.enqueueing import EnqueueVerbs
from windlass.store.memory.explaining import ExplainVerbs
from windlass.store.memory.operating import OperateVerbs
from windlass.store.memory.reading import ReadVerbs
from windlass.store.memory.ruling import RuleVerbs
from windlass.store.memory.scheduling import ScheduleVerbs
from windlass.store.memory.settling import SettleVerbs
from windlass.store.port import Wake


class NoTrouble:
    """Listening that cannot break."""

    trouble = ""


class MemoryStore(
    EnqueueVerbs,
    ClaimVerbs,
    SettleVerbs,
    CompleteVerbs,
    OperateVerbs,
    ReadVerbs,
    ExplainVerbs,
    DeadVerbs,
    ScheduleVerbs,
    BreakerVerbs,
    RuleVerbs,
):
    """All verbs on plain dictionaries; may be used from several threads and event loops."""

    async def open(self) -> None:
        """Do nothing: there is nothing to connect to."""

    async def close(self) -> None:
        """Keep everything: closing and opening again loses no task."""

    def beside(self) -> "MemoryStore":
        """Return itself: the lock makes it safe for every thread."""
        return self

    async def check(self) -> None:
        """Do nothing: it is always there."""

    def listen(
        self,
        wake: Wake,
        *,
        ordered: Callable[[UUID], None] | None = None,
        scheduled: Callable[[], None] | None = None,
    ) -> AbstractAsyncContextManager[NoTrouble]:
        """Call these from any thread: `wake` whenever there may be work, `ordered` of whom something is asked."""
        return self._listening(wake, ordered or _ignore, scheduled)

    def wake(self) -> None:
        """Wake whoever listens: time has passed."""
        with self._lock:
            listeners = list(self._listeners)
        for wake in listeners:
            wake()

    @asynccontextmanager
    async def _listening(
        self,
        wake: Wake,
        ordered: Callable[[UUID], None],
        scheduled: Callable[[], None] | None,
    ) -> AsyncIterator[NoTrouble]:
        with self._lock:
            self._listeners.append(wake)
            self._order_listeners.append(ordered)
            if scheduled is not None:
                self._schedule_listeners.append(scheduled)
        try:
            yield NoTrouble()
        finally:
            with self._lock:
                self._listeners.remove(wake)
                self._order_listeners.remove(ordered)
                if scheduled is not None:
                    self._schedule_listeners.remove(scheduled)


def _ignore(_: UUID) -> None:
    pass
