"""Watches the store's clock beside our own: leases must not all seem to have run out at once."""

import threading
import time
from datetime import datetime, timedelta
from typing import NamedTuple

from windlass.model.limits import UNNOTICED_STEP
from windlass.store.port import ClockStore
from windlass.telemetry import emit

PROMPTLY = 0.5  # seconds: a slower answer may hide a step of as much, and proves nothing
# For clocks that are set right in passing: with two answers it comes to what may go unnoticed.
TOLERANCE = UNNOTICED_STEP - 2 * timedelta(seconds=PROMPTLY)


class _Reading(NamedTuple):
    store_time: datetime
    asked_at: float  # monotonic
    answered_at: float


class ClockWatch:
    """Notices that the store's clock has jumped. The heart looks at each beat, the leader too.

    After a jump ahead every lease that was granted before seems to be over, although its worker
    lives. So nothing is rescued for one lease: by then it has beaten, and holds its claims again.
    Whoever has just begun to look may have missed one, and waits until the others have beaten.
    After a jump back those of a worker that was lost just then would last for as long: it is told
    apart from others once the clock was steady for as long as they need to beat. Nothing is
    rescued until then either: in the very moment of the jump they are not told apart.
    """

    def __init__(self, *, lease: timedelta, heartbeat: timedelta) -> None:
        self._lease = lease.total_seconds()
        self._heartbeat = heartbeat.total_seconds()
        self._lock = threading.Lock()
        self._last: _Reading | None = None
        self._steady_since = time.monotonic()
        self._doubtful_until = 0.0

    @property
    def steady_for(self) -> timedelta:
        """How long the clock has gone evenly, as far as we have seen."""
        with self._lock:
            seen_at = self._last.asked_at if self._last else self._steady_since
            return timedelta(seconds=max(0.0, seen_at - self._steady_since))

    def has_looked_within(self, seconds: float) -> bool:
        """Whether somebody has asked for the time so lately."""
        with self._lock:
            return self._last is not None and time.monotonic() - self._last.asked_at < seconds

    async def look(self, store: ClockStore) -> bool:
        """Look at the clock; return whether leases that seem to be over are to be believed so."""
        asked_at = time.monotonic()
        reading = _Reading(await store.now(), asked_at, time.monotonic())
        with self._lock:
            if self._last is None:
                self._steady_since = reading.answered_at
                self._doubtful_until = reading.answered_at + self._heartbeat + PROMPTLY
            else:
                self._compare(self._last, reading)
            if reading.answered_at - asked_at > PROMPTLY:
                self._steady_since = reading.answered_at
            self._last = reading
            return reading.answered_at >= self._doubtful_until

    def _compare(self, last: _Reading, new: _Reading) -> None:
        passed = new.store_time - last.store_time
        least = timedelta(seconds=new.asked_at - last.answered_at) - TOLERANCE
        most = timedelta(seconds=new.answered_at - last.asked_at) + TOLERANCE
        if least <= passed <= most:
            return
        jumped = passed - timedelta(seconds=new.answered_at - last.answered_at)
        emit("clock.jumped", seconds=round(jumped.total_seconds(), 1))
        self._steady_since = new.answered_at
        self._doubtful_until = new.answered_at + self._lease
