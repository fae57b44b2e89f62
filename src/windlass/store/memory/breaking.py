"""Breakers that workers share, in memory."""

from collections.abc import Sequence
from datetime import datetime, timedelta
from uuid import UUID

from windlass.model.breaker import SharedBreaker
from windlass.store.memory.state import BreakerEntry
from windlass.store.memory.tables import MemoryTables, transaction

NO_TIME = timedelta(0)


class BreakerVerbs(MemoryTables):
    """What one worker has found out, for the others."""

    @transaction
    async def breakers(self, names: Sequence[str]) -> list[SharedBreaker]:
        now = self._clock()
        known = {name: self._breakers[name] for name in names if name in self._breakers}
        return [
            SharedBreaker(name, one.epoch, None if one.is_closed else _left(one, now))
            for name, one in known.items()
        ]

    @transaction
    async def open_breaker(self, name: str, *, epoch: int, recovery: timedelta) -> bool:
        known = self._breakers.get(name)
        if known is not None and known.epoch != epoch:
            return False
        self._breakers[name] = BreakerEntry(epoch + 1, self._clock() + recovery, recovery)
        return True

    @transaction
    async def close_breaker(self, name: str, *, epoch: int) -> bool:
        known = self._breakers.get(name)
        if known is None or known.epoch != epoch or known.is_closed:
            return False
        self._breakers[name] = BreakerEntry(epoch + 1)
        return True

    @transaction
    async def probe_breaker(self, name: str, *, epoch: int, holder: UUID, lease: timedelta) -> bool:
        now, known = self._clock(), self._breakers.get(name)
        if known is None or known.epoch != epoch or known.is_closed or _left(known, now) > 0:
            return False
        if known.prober not in (None, holder) and now < known.prober_until <= now + lease:
            return False
        self._breakers[name] = known._replace(prober=holder, prober_until=now + lease)
        return True

    @transaction
    async def leave_breaker(self, name: str, *, holder: UUID) -> None:
        known = self._breakers.get(name)
        if known is not None and known.prober == holder:
            self._breakers[name] = known._replace(prober=None)


def _left(known: BreakerEntry, now: datetime) -> float:
    """Seconds until it is half-open; none if those are more than it was opened for: time was set back."""
    left = NO_TIME if known.half_open_at is None else known.half_open_at - now
    return left.total_seconds() if NO_TIME <= left <= known.opened_for else 0.0
